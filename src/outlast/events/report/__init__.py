"""The report of a run, from its event logs: the faults, what each restart took, what was lost.

    report = load_run("build/demo")  # the newest run there; one JSONL file per process
    print(to_json(report))

`build` is pure: the same events make the same report, in any order of files. `run` reads them in
one pass; `calls` and `course` find what happened, `recoveries`, `goodput` and `checkpoints` what it
took; `model` and `report` hold it; `text` and `page` show it.

Two rules hold. Times of different hosts are never compared: detection and the total of a restart
are measured on the host of the fault. And a fault that looks like the consequence of another is
never the first cause if there is any other: a killed rank leaves broken connections, which make its
peers fail before its monitor process reports the death.
"""

from __future__ import annotations

import os

from outlast.events.report.builder import build as build
from outlast.events.report.model import PHASE_FIELDS as PHASE_FIELDS
from outlast.events.report.model import Cause as Cause
from outlast.events.report.model import HostTime as HostTime
from outlast.events.report.model import Party as Party
from outlast.events.report.model import Phases as Phases
from outlast.events.report.model import RankRecovery as RankRecovery
from outlast.events.report.model import Restart as Restart
from outlast.events.report.model import Span as Span
from outlast.events.report.page import render_html as render_html
from outlast.events.report.report import Report as Report
from outlast.events.report.report import Saves as Saves
from outlast.events.report.sentences import describe_cause as describe_cause
from outlast.events.report.sentences import headline_host as headline_host
from outlast.events.report.sentences import lost_time as lost_time
from outlast.events.report.sentences import parts_of as parts_of
from outlast.events.report.sentences import printable as printable
from outlast.events.report.text import render_report as render_report
from outlast.events.report.text import to_json as to_json
from outlast.events.report.text import to_trace as to_trace
from outlast.events.run_folders import load


def load_run(directory: str | os.PathLike[str], run: str | None = None) -> Report:
    """The report of one run of a job, from its event logs.

    Args:
        directory: the directory of events (`--events-dir`), or the folder of one run in it.
        run: name or ID of the run; the newest by default.

    Raises:
        EventLogError: if there is no such directory, run or log, or if a file is damaged: names
            file and line. The last line of a file may be torn: its process was killed.
    """
    return build(load(directory, run))

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

from outlast.events.report.builder import build
from outlast.events.report.model import (
    PHASE_FIELDS,
    Cause,
    HostTime,
    Party,
    Phases,
    RankRecovery,
    Restart,
    Span,
)
from outlast.events.report.page import render_html
from outlast.events.report.report import Report, Saves
from outlast.events.report.sentences import (
    describe_cause,
    headline_host,
    lost_time,
    parts_of,
    printable,
)
from outlast.events.report.text import render_report, to_json, to_trace
from outlast.events.run_folders import load

__all__ = [
    "PHASE_FIELDS",
    "Cause",
    "HostTime",
    "Party",
    "Phases",
    "RankRecovery",
    "Report",
    "Restart",
    "Saves",
    "Span",
    "build",
    "describe_cause",
    "headline_host",
    "load",
    "load_run",
    "lost_time",
    "parts_of",
    "printable",
    "render_html",
    "render_report",
    "to_json",
    "to_trace",
]


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

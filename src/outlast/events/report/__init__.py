"""The report of a run, computed from its event logs: faults, durations of the restarts, losses.

    events = load("build/demo")          # the newest run there; one JSONL file per process
    report = build(events)               # dataclasses, see `report/model/`
    print(to_json(report))
    render(Path("build/demo"), Console())

`build` is pure: the same events make the same report, in any order of files. It follows two rules.
Times of different hosts are never compared: detection and the total of a restart are measured on
the host of the fault. And a fault that looks like the consequence of another is never the first
cause if there is any other: a killed rank leaves broken connections, which make its peers fail
before its monitor process reports the death.
"""

from outlast.events.report.builder import build
from outlast.events.report.html import render_html
from outlast.events.report.log_reader import load, load_run
from outlast.events.report.model import (
    PHASE_FIELDS,
    Cause,
    HostTime,
    Party,
    Phases,
    Report,
    Restart,
    Saves,
)
from outlast.events.report.render import render, render_report, to_json

__all__ = [
    "PHASE_FIELDS",
    "Cause",
    "HostTime",
    "Party",
    "Phases",
    "Report",
    "Restart",
    "Saves",
    "build",
    "load",
    "load_run",
    "render",
    "render_html",
    "render_report",
    "to_json",
]

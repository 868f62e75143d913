"""The report of a run, from its event logs: the faults, what each restart took, what was lost.

    log_reader    the logs of a run, read strictly
    one_pass      `Run`: each event goes to its host, process, kind and call; times become seconds
                  from the first event of their host
    figures       from what the pass has kept: calls (iterations, first causes), rounds (without
                  `Wrapper`), phases, gaps, goodput, redone steps, lost hosts, saves, the timeline
    model, report `Report`: plain dataclasses
    views         text, JSON, an HTML page, a trace for Perfetto

    events = load("build/demo")          # the newest run there; one JSONL file per process
    report = build(events)
    print(to_json(report))
    render(Path("build/demo"), Console())

`build` is pure: the same events make the same report, in any order of files. It follows two rules.
Times of different hosts are never compared: detection and the total of a restart are measured on
the host of the fault. And a fault that looks like the consequence of another is never the first
cause if there is any other: a killed rank leaves broken connections, which make its peers fail
before its monitor process reports the death.
"""

from outlast.events.report.builder import build
from outlast.events.report.log_reader import load, load_run
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
from outlast.events.report.report import Report, Saves
from outlast.events.report.views.page import render_html
from outlast.events.report.views.text import render, render_report, to_json
from outlast.events.report.views.trace import to_trace
from outlast.events.report.words import PARTS, parts_of

__all__ = [
    "PARTS",
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
    "load",
    "load_run",
    "parts_of",
    "render",
    "render_html",
    "render_report",
    "to_json",
    "to_trace",
]

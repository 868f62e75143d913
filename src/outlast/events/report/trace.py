"""The timeline as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open, in
Chrome's trace event format (JSON).

A host is a process of the trace and a lane is a thread. Times are in microseconds from the first
event of the host with the longest wall time, by whose clock the other hosts are placed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from outlast.events.report.model import RankRecovery, Span
from outlast.events.report.report import HostTimeline, Lane, Report

Event = dict[str, Any]


def to_trace(report: Report) -> str:
    """The states of each rank with the phases of its recoveries inside; marks are instants."""
    events = [
        event
        for number, host in enumerate(report.timeline, start=1)
        for event in _host(host, number, report)
    ]
    about = {"run": report.run_id, "command": report.command}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _host(host: HostTimeline, number: int, report: Report) -> Iterator[Event]:
    yield _name("process_name", host.host, number)
    shift = host.shift or 0.0
    recoveries: dict[int, list[RankRecovery]] = {}
    for restart in report.restarts:
        for rank in restart.ranks:
            if rank.host == host.host:
                recoveries.setdefault(rank.lane, []).append(rank)
    for thread, lane in enumerate(host.lanes, start=1):
        place = {"pid": number, "tid": thread}
        yield _name("thread_name", lane.name, number, tid=thread)
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}}
        for count, span in enumerate(lane.spans):
            if lane.rank >= 0:
                yield _slice(span, shift, "state", place)
                continue
            for kind, moment in (("b", span.start), ("e", span.end)):  # saves may overlap
                own = {"ph": kind, "name": span.state, "cat": lane.name, "id": f"{number}-{count}"}
                yield {**own, "ts": _us(moment + shift), **place}
        for phase in _inside(lane, recoveries.get(lane.rank, [])):
            yield _slice(phase, shift, "phase", place)
        for mark in lane.marks:
            yield {
                **{"ph": "i", "s": "t", "name": mark.kind, "cat": "mark"},
                **{"ts": _us(mark.at + shift), "args": {"text": mark.text}},
                **place,
            }


def _inside(lane: Lane, recoveries: list[RankRecovery]) -> Iterator[Span]:
    """The phases within the spans in which the lane was restarting, one after another: slices of
    one thread must not overlap by halves.
    """
    phases = deque(sorted((p for each in recoveries for p in each.phases), key=lambda p: p.start))
    for span in lane.spans:
        begin = span.start
        while span.state == "restarting" and phases and phases[0].start < span.end:
            phase = phases.popleft()
            start, end = max(phase.start, begin), min(phase.end, span.end)
            if start < end:
                yield Span(state=phase.state, start=start, end=end)
                begin = end


def _slice(span: Span, shift: float, category: str, place: dict[str, int]) -> Event:
    start, end = _us(span.start + shift), _us(span.end + shift)
    return {
        "ph": "X",
        "name": span.state,
        "cat": category,
        "ts": start,
        "dur": end - start,
        **place,
    }


def _name(kind: str, name: str, pid: int, tid: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)

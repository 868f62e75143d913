"""The report names the hosts that a job has lost."""

from __future__ import annotations

import io

from rich.console import Console

from events.synthetic_run import SyntheticRun
from outlast.events import HostJoined, HostLost
from outlast.events.report import build
from outlast.events.report.render import render_report

LOST = {"host_id": "c-1", "name": "c", "address": "10.0.0.3", "reason": "no heartbeat for 3.6 s"}


def test_a_lost_host_is_named_once() -> None:
    run = SyntheticRun(hosts=["a", "b"])
    run.begin(at=0.0)
    for host, at in (("a", 10.0), ("b", 11.0)):  # each launcher writes what it has learned
        joined = HostJoined(host=host, pid=1, time=1.0, host_id="c-1", name="c", address="10.0.0.3")
        lost = HostLost(host=host, pid=1, time=at, **LOST)  # type: ignore[arg-type]
        run.events += [joined, lost]
    report = build(run.events)
    assert [(loss.name, loss.seen_by) for loss in report.hosts_lost] == [("c", "a")]
    text = io.StringIO()
    render_report(report, Console(file=text, width=200))
    sentence = (
        "Host c (10.0.0.3) was lost, 10.000 s into the run as a saw it: no heartbeat for 3.6 s."
    )
    assert text.getvalue().count(sentence) == 1

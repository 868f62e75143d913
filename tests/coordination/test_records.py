"""Records as lines of JSON, and which of several faults is named as the first cause."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.coordination.records import LostRecord, lines, to_line
from outlast.events.fault_record import FaultRecord
from outlast.events.first_cause import first_cause


def fault(member: int, interruption: str = "EXCEPTION", **fields: Any) -> FaultRecord:
    return FaultRecord(3, member, member, "node", 100 + member, interruption, "why", **fields)


def test_what_was_appended_comes_back_line_by_line() -> None:
    records = [fault(0, traceback='two\nlines "quoted"'), fault(1, consequence=True, pings=7)]
    log = b"".join(to_line(record) for record in records)
    assert log.count(b"\n") == 2  # the line ends of a traceback are escaped
    assert [FaultRecord(**said) for said in lines(log)] == records
    assert LostRecord(**lines(to_line(LostRecord(4, "gone", ends_job=True)))[0]).ends_job
    assert lines(None) == lines(b"") == []


def test_without_a_fault_there_is_no_cause() -> None:
    assert first_cause([]) is None


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        pytest.param([fault(0), fault(1)], 0, id="the first report"),
        pytest.param([fault(0, consequence=True), fault(1)], 1, id="an echo comes last"),
        pytest.param(
            [fault(0, consequence=True), fault(1, consequence=True)], 0, id="nothing but echoes"
        ),
        pytest.param(
            [fault(0, consequence=True), fault(1, overtaken=True)], 1, id="a bare echo comes last"
        ),
        pytest.param(
            [fault(0, overtaken=True), fault(1), fault(2, "UNRESPONSIVE")],
            2,
            id="an overtaken exception may have been handled",
        ),
        pytest.param(
            [fault(0, overtaken=True), fault(1, "SOFT_TIMEOUT", pings=3, consequence=True)],
            1,
            id="a hung rank before an overtaken exception",
        ),
        pytest.param([fault(0), fault(1, "TERMINATED")], 1, id="an end before an exception"),
        pytest.param([fault(0), fault(1, "HARD_TIMEOUT")], 1, id="the hard timeout is an end"),
        pytest.param(
            [fault(0), fault(1, "UNRESPONSIVE"), fault(2, "TERMINATED")], 2, id="an end is sure"
        ),
        pytest.param([fault(0), fault(1, "UNRESPONSIVE")], 1, id="silence before an exception"),
        pytest.param([fault(0, "SOFT_TIMEOUT", pings=9), fault(1)], 1, id="hung ranks are victims"),
        pytest.param(
            [
                fault(0, "SOFT_TIMEOUT", pings=9),
                fault(1, "SOFT_TIMEOUT", pings=3),
                fault(2, "SOFT_TIMEOUT", pings=5),
            ],
            1,
            id="least progress",
        ),
        pytest.param(
            [fault(0, "SOFT_TIMEOUT", pings=4), fault(1, "SOFT_TIMEOUT", pings=4)],
            0,
            id="as much progress: the first report",
        ),
    ],
)
def test_the_first_cause(faults: list[FaultRecord], cause: int) -> None:
    named = first_cause(faults)
    assert named is not None
    assert named.member == cause


def test_what_a_hung_rank_says_itself_supersedes_its_monitor() -> None:
    monitors = [fault(0, "SOFT_TIMEOUT", pings=2), fault(1, "SOFT_TIMEOUT", pings=6)]
    # Rank 0 made the least progress, but it waited in a collective for rank 1, as it says.
    waited = fault(0, "SOFT_TIMEOUT", pings=2, consequence=True)
    hung = fault(1, "SOFT_TIMEOUT", pings=6, traceback="here")
    assert first_cause([*monitors, waited]) == monitors[1]
    assert first_cause([*monitors, waited, hung]) == hung


def test_the_report_of_the_rank_itself_supersedes_timeouts_only() -> None:
    raised = fault(0)
    assert first_cause([raised, fault(0, "SOFT_TIMEOUT", pings=1)]) == raised

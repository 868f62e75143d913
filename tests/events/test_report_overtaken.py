"""The report of an exception that the restart interrupted before it had left the function."""

from __future__ import annotations

from events.synthetic_run import RESTART, SyntheticRun
from events.test_report_hosts import run_without_a_host
from outlast.events.report import build
from outlast.events.report.sentences import describe

CLOSED = "RuntimeError: Connection closed by peer"
LATE_S = 0.25


def faulty(*, hung: bool = False, real: bool = False, joiners: tuple[str, ...] = ()) -> str:
    """The text about a restart in which rank 2 is interrupted with a `KeyError`."""
    run = SyntheticRun()
    run.begin(at=1.0)
    run.fault(0, at=11.0, cause=CLOSED, consequence=True)
    if hung:
        run.fault(2, at=11.0, interruption="SOFT_TIMEOUT", cause="no progress for 9 s", idle=9.0)
    if real:
        run.fault(3, at=11.0)
    run.fault(2, at=11.0 + LATE_S, cause="KeyError: 'mine'", overtaken=True)
    run.restart(at=11.0, joiners=joiners)
    run.complete(at=21.5)
    report = build(run.events)
    (restart,) = report.restarts
    assert restart.at == 10.0
    assert joiners or restart.phases.total == RESTART  # from the first sign of a fault
    return " ".join(describe("restart", restart, report))


def test_it_is_the_first_cause_beside_consequences() -> None:
    text = faulty()
    assert text.startswith("Rank 2 (pid 1002, host a) raised an exception: KeyError: 'mine'. The")
    assert "interrupted this exception in the function, which may have handled it" in text
    assert f"Probably as a consequence, rank 0 failed: {CLOSED}." in text


def test_it_is_not_beside_an_exception_that_left_the_function() -> None:
    text = faulty(real=True)
    assert text.startswith("Rank 3 (pid 1003, host a) raised an exception: ValueError: a bad batch")
    assert "Rank 2 (pid 1002, host a) was interrupted with an exception: KeyError: 'mine'." in text


def test_the_hang_of_the_same_rank_comes_first_and_hides_nothing() -> None:
    text = faulty(hung=True)
    assert text.startswith("Rank 2 (pid 1002, host a) ")
    assert text.index("no progress for 9 s") < text.index("an exception: KeyError: 'mine'")


def test_a_job_that_grows_has_no_fault() -> None:
    assert faulty(joiners=("a",)).startswith("No fault: the iteration ended so that new ranks")


def test_a_lost_host_stays_the_first_cause() -> None:
    run = run_without_a_host()
    i = next(i for i, event in enumerate(run.events) if event.kind == "fault")
    late = SyntheticRun(hosts=run.hosts)
    late.fault(0, at=12.5, cause="KeyError: 'mine'", overtaken=True)
    run.events.insert(i + 1, *(e for e in late.events))
    report = build(run.events)
    (restart,) = report.restarts
    assert restart.host_loss is not None
    text = " ".join(describe("restart", restart, report))
    assert "Probably as a consequence, ranks 0 and 2 failed: RuntimeError: Connection" in text
    assert "KeyError" not in text

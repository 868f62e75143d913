"""`Agreement`: an interrupt at any line of a step is seen by the other rank, in that operation."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any

import pytest

from outlast.coordination import agreement, collective_guard
from outlast.coordination.agreement import MISFIT, Agreement
from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.errors import CheckpointError, CheckpointMismatch, FolderUnusable, RankTimeout
from outlast.inprocess.interruption.error_kinds import is_consequence

LIMIT_S = 60.0  # the other rank must not wait for so long
NEVER_S = 1e6


def pair(store: MemoryStore, **arguments: Any) -> list[Agreement]:
    return [Agreement(CallLedger(store, "x", n, 2), LIMIT_S, "c", **arguments) for n in (0, 1)]


def take_steps(ranks: Agreement) -> None:
    ranks.attempt(lambda: None)
    ranks.gather(ranks.rank, list)
    ranks.attempt(lambda: None, collective=True)
    ranks.gather(None, len, until_read=True)
    assert ranks.attempt_and_gather(lambda: ("own", ranks.rank), list) == ("own", [0, 1])
    for failing in (0, 1):
        failure = ranks.attempt_and_gather(partial(fails, ranks, failing), list)
        assert isinstance(failure, CallFailure)
        failure = ranks.attempt(partial(fails, ranks, failing))
        assert isinstance(failure, CallFailure)


def fails(ranks: Agreement, failing: int) -> tuple[None, None]:
    if ranks.rank == failing:
        raise CheckpointMismatch("not this one")
    return None, None


def interrupted(ranks: Agreement, line: int) -> bool:
    """Takes two steps; whether the given line of the library, in the order of their execution, was
    reached, and interrupted.
    """
    left = line
    file = Agreement.attempt.__code__.co_filename

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != file or frame.f_code.co_name in ("operation", "_leave"):
            return None  # `operation` itself is the frame that reports
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt(f"at line {frame.f_lineno}")
        return trace

    def steps() -> None:
        with ranks.operation():
            take_steps(ranks)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        steps()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def steps(ranks: Agreement) -> str:
    """What the other rank learns of it."""
    try:
        with ranks.operation():
            take_steps(ranks)
            ranks.attempt(lambda: None)  # it learns of the last lines at the next step
    except CheckpointError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_rank_learns_of_an_interrupt_at_any_line(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_READ_S", 0.01)  # rank 0 lingers so long for who has left
    line, reached = 0, True
    with ThreadPoolExecutor() as threads:
        while reached:
            line += 1
            parts = pair(MemoryStore(), interrupt=threading.Event.wait)
            other = threads.submit(steps, parts[1 - rank])
            reached = interrupted(parts[rank], line)
            if not reached:
                parts[rank].attempt(lambda: None)
                assert other.result() == ""
            else:
                assert "KeyboardInterrupt" in other.result(), f"line {line}"
                # They have counted the same steps: the next one is the same for both.
                after = threads.map(lambda ranks: ranks.gather(ranks.rank, list), parts)
                assert list(after) == [[0, 1]] * 2, f"line {line}"
    assert line > 20


@pytest.mark.parametrize(("error", "kind"), [(FolderUnusable, FolderUnusable), (OSError, None)])
def test_an_error_of_rank_0_is_that_of_another_rank_on_the_others(
    error: type[Exception], kind: type[CheckpointError] | None
) -> None:
    parts = pair(MemoryStore())

    def gather(ranks: Agreement) -> CheckpointError:
        def work(_: list[Any]) -> None:
            raise error("no room")

        with pytest.raises(kind or CheckpointError) as e:
            ranks.gather(None, work)
        return e.value

    with ThreadPoolExecutor() as threads:
        raised = list(threads.map(gather, parts))
    assert [str(each) for each in raised] == ["no room", "rank 0: no room"]
    assert [each.of_another_rank for each in raised] == [False, True]
    assert [is_consequence(each) for each in raised] == [False, True]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_rank_attempts_before_a_gathering_fails_on_all(failing: int) -> None:
    parts = pair(MemoryStore())

    def attempt(ranks: Agreement) -> Any:
        found = ranks.attempt_and_gather(partial(fails, ranks, failing), list)
        return found, ranks.gather(ranks.rank, list)  # they go on with the same step

    with ThreadPoolExecutor() as threads:
        found = list(threads.map(attempt, parts))
    for failure, after in found:
        assert (failure.name, failure.rank, failure.cause) == (MISFIT, failing, "not this one")
        assert after == [0, 1]


@pytest.mark.parametrize("step", ["gather", "attempt"])
def test_a_rank_that_has_left_is_the_one_that_failed(step: str) -> None:
    here, other = pair(MemoryStore())
    with pytest.raises(ValueError, match="mine"), other.operation():
        raise ValueError("mine")
    with pytest.raises(CheckpointError, match=r"rank 1 on .*mine") as e:
        here.gather(None, list) if step == "gather" else here.attempt(lambda: None)
    assert e.value.of_another_rank


@pytest.mark.parametrize("step", ["gather", "attempt"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_in_time_is_named_on_all(step: str, rank: int) -> None:
    parts = pair(MemoryStore(), late=RankTimeout)

    def take(ranks: Agreement) -> object:
        if step == "gather":
            return ranks.gather(None, len, "the choice")
        return ranks.attempt(lambda: None, "the choice")

    text = f"the choice: rank {1 - rank} did not make the call within 0:00:00, rank {rank} waited"
    for ranks in (parts[rank], parts[1 - rank]):  # the other one comes when the time is over
        ranks.timeout_s = 0.0 if ranks is parts[rank] else LIMIT_S
        with pytest.raises(RankTimeout) as e:
            take(ranks)
        assert str(e.value) == text
        ranks.timeout_s = LIMIT_S
    with ThreadPoolExecutor() as threads:
        assert len(set(threads.map(take, parts))) == 1


def test_a_rank_that_comes_late_does_not_wait_for_rank_0_again() -> None:
    store = MemoryStore()
    first, late = (Agreement(CallLedger(store, "x", n, 3), LIMIT_S, "c") for n in (1, 2))
    first.timeout_s = 0.0
    late.timeout_s = NEVER_S
    for ranks in (first, late):
        with pytest.raises(CheckpointError, match=r"ranks 0, 2 did not .* rank 1 waited"):
            ranks.gather(None, len)


def test_a_result_that_rank_0_does_not_give_in_time() -> None:
    parts = pair(MemoryStore(), late=RankTimeout)
    parts[1].timeout_s = 0.01
    late = threading.Event()

    def work(_: list[Any]) -> str:
        assert late.wait(LIMIT_S)
        return "late"

    with ThreadPoolExecutor() as threads:
        first = threads.submit(parts[0].gather, None, work, "the save")
        with pytest.raises(RankTimeout, match="the save on rank 0: rank 0 did not make the call"):
            parts[1].gather(None, work, "the save")
        late.set()
        assert first.result() == "late"
    with pytest.raises(CheckpointError, match=r"rank 1 on .*the save on rank 0"):
        parts[0].attempt(lambda: None)


def test_work_that_waits_for_a_rank_that_has_failed_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collective_guard, "GRACE_S", 0.0)
    ended = threading.Event()

    def interrupt(left: threading.Event) -> None:
        ended.set()
        left.wait()

    def collective() -> None:
        assert ended.wait(LIMIT_S)
        raise CheckpointError("ended")

    def fail() -> None:
        raise CheckpointError("mine")

    parts = pair(MemoryStore(), interrupt=interrupt)
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(parts[0].attempt, collective, collective=True)
        failures = [parts[1].attempt(fail, collective=True), waits.result()]
    assert [each.cause for each in failures] == ["mine", "mine"]
    assert [each.rank for each in failures] == [1, 1]


def test_rank_0_stays_until_the_others_have_read_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts, order = pair(MemoryStore()), []
    conclusion = parts[1]._conclusion

    def read(*args: Any) -> bytes:
        found = conclusion(*args)
        order.append("read")
        return found

    def gather(ranks: Agreement) -> None:
        ranks.gather(None, len, until_read=True)
        order.append(f"rank {ranks.rank} left")

    monkeypatch.setattr(parts[1], "_conclusion", read)
    with ThreadPoolExecutor() as threads:
        list(threads.map(gather, parts))
    assert order[0] == "read"


def test_rank_0_learns_at_once_that_its_result_was_not_awaited() -> None:
    parts = pair(MemoryStore(), late=RankTimeout)
    parts[1].timeout_s = 0.01
    late = threading.Event()

    def work(_: list[Any]) -> str:
        assert late.wait(LIMIT_S)
        return "late"

    with ThreadPoolExecutor() as threads:
        first = threads.submit(parts[0].gather, None, work, "the save", until_read=True)
        with pytest.raises(RankTimeout, match="the save on rank 0: rank 0 did not make the call"):
            parts[1].gather(None, work, "the save", until_read=True)
        late.set()
        with pytest.raises(RankTimeout, match=r"the save on rank 0: .* rank 1 waited"):
            first.result()
        parts[1].timeout_s = LIMIT_S
        after = threads.map(lambda ranks: ranks.exchange(ranks.rank), parts)
        assert list(after) == [[0, 1]] * 2


def test_a_wait_that_is_given_up() -> None:
    ranks = pair(MemoryStore())[1]
    ranks.timeout_s = NEVER_S
    with ThreadPoolExecutor() as threads:
        wait = threads.submit(ranks.gather, None, list)
        while not ranks._steps:
            pass
        ranks.give_up("the group is gone")
        with pytest.raises(CheckpointError, match="the group is gone"):
            wait.result()

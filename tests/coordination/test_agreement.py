"""`Agreement`: an interrupt at any line of a step is seen by the other rank, in that operation."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.errors import CheckpointError, FolderUnusable
from outlast.inprocess.interruption.error_kinds import is_consequence

LIMIT_S = 60.0  # the other rank must not wait for so long


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
            ranks.attempt(lambda: None)
            ranks.gather(ranks.rank, list)

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
            ranks.attempt(lambda: None)
            ranks.gather(ranks.rank, list)
            ranks.attempt(lambda: None)  # it learns of the last lines at the next step
    except CheckpointError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_rank_learns_of_an_interrupt_at_any_line(rank: int) -> None:
    line, reached = 0, True
    with ThreadPoolExecutor() as threads:
        while reached:
            line += 1
            store = MemoryStore()
            parts = [Agreement(CallLedger(store, "x", n, 2), LIMIT_S, "c") for n in (0, 1)]
            other = threads.submit(steps, parts[1 - rank])
            reached = interrupted(parts[rank], line)
            if not reached:
                parts[rank].attempt(lambda: None)
                assert other.result() == ""
            else:
                assert "KeyboardInterrupt" in other.result(), f"line {line}"
    assert line > 20


@pytest.mark.parametrize(("error", "kind"), [(FolderUnusable, FolderUnusable), (OSError, None)])
def test_an_error_of_rank_0_is_that_of_another_rank_on_the_others(
    error: type[Exception], kind: type[CheckpointError] | None
) -> None:
    store = MemoryStore()
    parts = [Agreement(CallLedger(store, "x", n, 2), LIMIT_S, "c") for n in (0, 1)]

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


@pytest.mark.parametrize("step", ["gather", "attempt"])
def test_a_rank_that_has_left_is_the_one_that_failed(step: str) -> None:
    store = MemoryStore()
    here, other = (Agreement(CallLedger(store, "x", n, 2), LIMIT_S, "c") for n in (0, 1))
    with pytest.raises(ValueError, match="mine"), other.operation():
        raise ValueError("mine")
    with pytest.raises(CheckpointError, match=r"rank 1 on .*mine") as e:
        here.gather(None, list) if step == "gather" else here.attempt(lambda: None)
    assert e.value.of_another_rank

"""`Agreement`: an interrupt at any line of a step is seen by the other rank, in that operation."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.memory_store import MemoryStore
from outlast.errors import CheckpointError

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

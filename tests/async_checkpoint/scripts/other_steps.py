"""Ranks that save different steps, in a given order, or that do not come to a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RANK, join_group, leave_group, main, meet, raising, say, scenario

from async_checkpoint.checkpoints import NET, blank, copy_of, left_over, state_of, valid_steps
from outlast.async_checkpoint import Checkpointer
from outlast.coordination.call_ledger import Round


def save(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> None:
    checkpointer.save(step, state).wait(NET)


def after_announcement(first: int, name: str) -> None:
    """Lets the rank `first` begin; the other ranks return once that one has announced its save."""
    store: Any = dist.distributed_c10d._get_default_store()
    if first != RANK:
        store.wait([name])
        return
    patch = pytest.MonkeyPatch()
    finish = Round.finish

    def finished(announced: Round, part: bytes | None = None) -> None:
        patch.undo()
        finish(announced, part)
        store.set(name, "")

    patch.setattr(Round, "finish", finished)


# Which ranks have a new structure, how many saves of equal steps come before, which rank is first.
CASES = [
    *(("both", 0, first) for first in (0, 1)),
    *((new, 2, first) for new in ("none", "both", "0", "1") for first in (0, 1)),
]


@scenario
def differ(path: str, *numbers: str) -> None:
    join_group()
    for number in map(int, numbers):
        new, equal, first = CASES[number]
        folder = Path(path) / str(number)
        with Checkpointer(folder) as checkpointer:
            for step in range(equal):
                save(checkpointer, step, state_of(step))
            own = {"own": torch.ones(9)} if equal and new in ("both", str(RANK)) else {}
            after_announcement(first, f"case {number}")
            raising(lambda: save(checkpointer, 20 - 2 * RANK, {**state_of(1), **own}))  # noqa: B023
            meet()
            assert valid_steps(folder) == list(range(equal))
            meet()
            save(checkpointer, 21, {**state_of(21), **own})
            assert valid_steps(folder) == [*range(equal), 21]
            found = copy_of({**blank(), **own})
            assert checkpointer.restore(found) == 21
        meet()
        assert left_over(folder) == []
    leave_group()


@scenario
def one_prepares(path: str) -> None:
    """What a restore does at its end, where another rank saves already."""
    join_group()
    with Checkpointer(path) as checkpointer:
        if RANK == 1:
            raising(lambda: checkpointer.saves.prepare(lambda: state_of(1)))
        else:
            raising(lambda: save(checkpointer, 5, state_of(5)))
        save(checkpointer, 6, state_of(6))
    leave_group()


@scenario
def one_does_not_come(path: str) -> None:
    """Rank 1 comes to the second save when rank 0 has given it up, under another step."""
    join_group()
    for number, new in enumerate((False, True)):
        folder = Path(path) / str(number)
        with Checkpointer(folder) as checkpointer:
            save(checkpointer, 1, state_of(1))
            own = {"own": torch.ones(9)} if new else {}
            writer = checkpointer.session.writer
            if RANK == 0:
                writer.timeout_s = 0.2
                raising(lambda: save(checkpointer, 2, {**state_of(2), **own}))  # noqa: B023
                writer.timeout_s = 60.0
            meet()
            if RANK == 1:
                raising(lambda: save(checkpointer, 3, {**state_of(3), **own}))  # noqa: B023
            meet()
            assert valid_steps(folder) == [1]
            meet()
            save(checkpointer, 4, {**state_of(4), **own})
            assert valid_steps(folder) == [1, 4]
        say("over", new=new)
    leave_group()


if __name__ == "__main__":
    main()

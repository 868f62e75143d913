"""Ranks that save through a checkpointer. Every scenario's first arguments: folder, plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RANK, join_group, leave_group, main, raising, say, scenario

from async_checkpoint.checkpoints import NET, copy_of, same, state_of
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer

patch = pytest.MonkeyPatch()


def use(plan: str) -> None:
    """Staged writers that follow the test's plan."""
    Plan(Path(plan)).use(patch)


def own_state(step: int) -> dict[str, Any]:
    """A state with a separate part on each rank, and a shared rest."""
    return {**state_of(step), f"own{RANK}": torch.full((1000,), step * 10 + RANK)}


@scenario
def saves(path: str, plan: str) -> None:
    use(plan)
    join_group()
    with Checkpointer(path) as checkpointer:
        handle = checkpointer.save(1, own_state(1))
        say("saving")
        handle.wait(NET)
        say("committed")
    leave_group()


@scenario
def one_fails(path: str, plan: str, mutation: str = "") -> None:
    use(plan)
    if mutation == "deaf" and RANK == 0:
        from inprocess.mutations import mutate
        from outlast.async_checkpoint.save.save import Save

        mutate(patch, Save.complete, "if failure is None:", "if True:")
    join_group()
    with Checkpointer(path) as checkpointer:
        handle = checkpointer.save(1, own_state(1))
        raising(lambda: handle.wait(NET))
        torch.distributed.barrier()
        if RANK == 0:
            Plan(Path(plan)).set()
        torch.distributed.barrier()
        checkpointer.save(2, own_state(2)).wait(NET)
    leave_group()


@scenario
def many(path: str, plan: str) -> None:
    use(plan)
    join_group()
    with Checkpointer(path, max_in_flight=2) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, own_state(step))
        checkpointer.wait(NET)
        state: dict[str, Any] = copy_of(own_state(0))
        assert checkpointer.restore(state) == 5
        assert same(state, own_state(5))
    leave_group()


if __name__ == "__main__":
    main()

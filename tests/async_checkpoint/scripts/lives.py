"""Processes that save until they are killed, and their successors."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RANK, WORLD_SIZE, join_group, main, say, scenario

from async_checkpoint.checkpoints import NET, blank, left_over, same, state_of
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer, Retention

NO_LINGER = datetime.timedelta()
LINGER = datetime.timedelta(seconds=60)


@scenario
def trains(path: str) -> None:
    """Restores from storage, and saves forever."""
    if WORLD_SIZE > 1:
        join_group()
    checkpointer = Checkpointer(path, keep=Retention(last=3), linger=NO_LINGER)
    state = blank()
    step = checkpointer.restore(state)
    assert step is None or same(state, state_of(step))
    say("restored", step=step, left=left_over(Path(path)) if RANK == 0 else [])
    step = 0 if step is None else step + 1
    while True:
        handle = checkpointer.save(step, state_of(step))
        say("saving", step=step)
        handle.wait(NET)
        say("committed", step=step)
        step += 1


@scenario
def exits_without_close(path: str) -> None:
    checkpointer = Checkpointer(path)
    checkpointer.save(1, state_of(1))
    checkpointer.save(2, state_of(2))


@scenario
def leaves_a_snapshot(path: str, plan: str, forks: str = "") -> None:
    """Commits step 1, begins to save step 2, and waits to be killed."""
    Plan(Path(plan)).use(pytest.MonkeyPatch())
    if WORLD_SIZE > 1:
        join_group()
    checkpointer = Checkpointer(path, linger=LINGER)
    checkpointer.save(1, own_state(1)).wait(NET)
    say("committed")
    if forks and os.fork() == 0:
        time.sleep(600)  # holds everything open
    gate = Plan(Path(plan)).gate(f"never{RANK}")
    if WORLD_SIZE > 1:
        dist.barrier()
    if RANK == 0:
        ranks = range(WORLD_SIZE)
        rule = {"op": "write_at", "do": "wait"}
        Plan(Path(plan)).set(*({**rule, "name": f"__{r}_*", "gate": f"never{r}"} for r in ranks))
    if WORLD_SIZE > 1:
        dist.barrier()
    checkpointer.save(2, own_state(2))
    gate.arrived()  # the writer has the snapshot: it is sent in the background
    say("saving", writer=checkpointer.session.writer.pid)
    time.sleep(600)


def own_state(step: int) -> dict[str, Any]:
    return {**state_of(step), f"own{RANK}": torch.full((100,), float(step + RANK))}


@scenario
def takes_a_snapshot(path: str) -> None:
    """The successor."""
    if WORLD_SIZE > 1:
        join_group()
    with Checkpointer(path, linger=NO_LINGER) as checkpointer:
        state = {**blank(), f"own{RANK}": torch.zeros(100)}
        step = checkpointer.restore(state)
        assert step is not None
        assert same(state, own_state(step))
        say("restored", step=step, handed_over=len(checkpointer.session.pool.handed_over))
        checkpointer.save(3, own_state(3)).wait(NET)
        assert checkpointer.session.pool.handed_over == []
        assert checkpointer.restore(state) == 3
        assert same(state, own_state(3))


if __name__ == "__main__":
    main()

"""Ranks on several "hosts" whose snapshots are copied to each other's memory."""

from __future__ import annotations

import datetime
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RANK, WORLD_SIZE, join_group, main, say, scenario

from async_checkpoint.checkpoints import NET, blank, same, state_of
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer
from outlast.events.event import Event
from outlast.events.types import CheckpointRestored, CopyCompleted, CopySkipped
from outlast.inprocess import CallWrapper, Compose, Wrapper
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

LINGER = datetime.timedelta(seconds=60)
ELEMENTS = 300_000


class Copies:
    """A sink that says what becomes of copies, and lets a scenario wait for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def write(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        if isinstance(event, CopyCompleted):
            say("copied", step=event.step, held_by=event.held_by, bytes=event.own_bytes)
        elif isinstance(event, CopySkipped):
            say("skipped", step=event.step, cause=event.cause)
        elif isinstance(event, CheckpointRestored):
            say("restored", step=event.step, source=event.source, held_by=event.held_by)

    def wait_for(self, step: int) -> Event:
        """Waits for the end of the copy of a step."""

        def found() -> list[Event]:
            kinds = (CopyCompleted, CopySkipped)
            return [e for e in self.events if isinstance(e, kinds) and e.step == step]

        with self._changed:
            assert self._changed.wait_for(found, NET.total_seconds())
            return found()[0]

    def close(self) -> None:
        pass


def own_state(step: int) -> dict[str, Any]:
    return {**state_of(step, 500), f"own{RANK}": torch.full((ELEMENTS,), float(step * 100 + RANK))}


def empty() -> dict[str, Any]:
    state = {**blank(), f"own{RANK}": torch.zeros(ELEMENTS)}
    state["model"]["weight"] = torch.zeros(500)
    return state


def keeper_of(checkpointer: Checkpointer) -> int | None:
    keeper = checkpointer.session.keeper
    return None if keeper is None else keeper.pid


@scenario
def leaves_copies(path: str, plan: str) -> None:
    """Commits step 1; step 2 is in memory and in copies only. Waits to be killed."""
    Plan(Path(plan)).use(pytest.MonkeyPatch())
    join_group()
    copies = Copies()
    checkpointer = Checkpointer(path, linger=LINGER, replicas=1, events=copies)
    checkpointer.save(1, own_state(1)).wait(NET)
    copies.wait_for(1)
    dist.barrier()
    if RANK == 0:
        Plan(Path(plan)).set({"op": "write_at", "do": "wait", "gate": "never"})
    dist.barrier()
    checkpointer.save(2, own_state(2))
    copies.wait_for(2)
    dist.barrier()
    say("ready", keeper=keeper_of(checkpointer), writer=checkpointer.session.writer.pid)
    time.sleep(600)


@scenario
def takes_copies(path: str) -> None:
    """The successors: restore, save, and restore from what was restored."""
    join_group()
    copies = Copies()
    with Checkpointer(path, replicas=1, events=copies) as checkpointer:
        state = empty()
        step = checkpointer.restore(state)
        assert step is not None
        assert same(state, own_state(step))
        say("state", step=step, same=True, keeper=keeper_of(checkpointer))
        # What was fetched is in this rank's memory now.
        again = empty()
        assert checkpointer.restore(again) == step
        assert same(again, state)
        checkpointer.save(step + 1, own_state(step + 1)).wait(NET)
        copies.wait_for(step + 1)
        dist.barrier()
    assert WORLD_SIZE > 1


@scenario
def restarts_in_place(path: str, plan: str, faults: str) -> None:
    """Faults with a copy in flight; then rank 1's host is lost, and replaced by another."""
    last = int(faults)
    Plan(Path(plan)).use(pytest.MonkeyPatch())
    copies = Copies()

    @Wrapper(
        repeated_faults=None,  # equal faults on purpose
        rank_assignment=Compose(ShiftRanks(), AwaitReplacements(NET)),
    )
    def train(call: CallWrapper) -> None:
        dist.init_process_group("gloo")
        slow = call.iteration < last
        bandwidth = 500_000.0 if slow else 1e9
        with Checkpointer(
            path, linger=LINGER, replicas=1, replica_bandwidth=bandwidth, events=copies
        ) as checkpointer:
            state = empty()
            step = checkpointer.restore(state)
            assert step is None or same(state, own_state(step))
            step = 0 if step is None else step
            say("began", iteration=call.iteration, step=step, rank=dist.get_rank())
            if slow:
                checkpointer.save(step + 1, own_state(step + 1)).wait(NET)
                if dist.get_rank() == call.iteration % 2:
                    raise ValueError("a planned fault, with a copy in flight")
                dist.barrier()
            elif call.iteration == last:
                checkpointer.save(step + 1, own_state(step + 1)).wait(NET)
                copies.wait_for(step + 1)
                dist.barrier()
                if dist.get_rank() == 0:
                    Plan(Path(plan)).set({"op": "write_at", "do": "wait", "gate": "never"})
                dist.barrier()
                checkpointer.save(step + 2, own_state(step + 2))
                copies.wait_for(step + 2)
                dist.barrier()
                pid = checkpointer.session.writer.pid
                say("ready", keeper=keeper_of(checkpointer), writer=pid)
                dist.barrier()
                time.sleep(600)
            else:
                if dist.get_rank() == 0:
                    Plan(Path(plan)).set()
                dist.barrier()
                checkpointer.save(step + 1, own_state(step + 1)).wait(NET)
                copies.wait_for(step + 1)
                dist.barrier()
                say("done", resources=resources())
        dist.barrier()
        dist.destroy_process_group()

    train()


def resources() -> list[str]:
    """The threads of copies."""
    return sorted(t.name for t in threading.enumerate() if "cop" in t.name or "keep" in t.name)


if __name__ == "__main__":
    main()

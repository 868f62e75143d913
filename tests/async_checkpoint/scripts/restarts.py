"""Training that is restarted in place, with a save in flight at each fault."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import psutil
import torch
import torch.distributed as dist
from ranks import main, say, scenario

from async_checkpoint.checkpoints import NET, blank, same, state_of
from outlast.async_checkpoint import Checkpointer, Retention
from outlast.async_checkpoint.writer.client import WriterClient
from outlast.async_checkpoint.writer.main import Writer
from outlast.inprocess import CallWrapper, Wrapper
from outlast.inprocess.rank_assignment import RankAssignment, ShiftRanks
from outlast.inprocess.rank_filter import MaxActiveWorldSize
from outlast.inprocess.state import State

ELEMENTS = 300_000


def own_state(step: int) -> dict[str, Any]:
    rank = dist.get_rank()
    return {**state_of(step, ELEMENTS), f"own{rank}": torch.full((ELEMENTS,), step * 10 + rank)}


def empty() -> dict[str, Any]:
    state = {**blank(), f"own{dist.get_rank()}": torch.zeros(ELEMENTS, dtype=torch.int64)}
    state["model"]["weight"] = torch.zeros(ELEMENTS)
    return state


def held(writing: WriterClient) -> dict[str, int]:
    """The resources of this process and its writer, when both are idle. The announcement of the
    writer does not count: one that has just replaced another has none until the next snapshot.
    Nor do the connections to the iteration's store: one more, if a rank has had to wait there.
    """
    dist.barrier()  # the other rank opens no connection meanwhile
    for reader in writing._readers[:-1]:
        reader.join(20)
        assert not reader.is_alive()
    for thread in threading.enumerate():
        if thread.name in ("outlast-release", "outlast-saver", "outlast-abort"):
            thread.join(20)
            assert not thread.is_alive(), thread.name
    gc.collect()
    writing.request(Writer.begin_save)  # done in order: everything dropped earlier has ended
    writer = psutil.Process(writing.pid)
    store = int(os.environ["MASTER_PORT"])
    ends = [
        end
        for end in psutil.Process().net_connections("tcp")
        if store in (end.laddr.port, end.raddr and end.raddr.port)
    ]
    return {
        "threads": len(threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")) - len(ends),
        "children": len(psutil.Process().children(recursive=True)),
        "shared": len([t for t in _targets(os.getpid()) if "outlast-snapshot" in t]),
        "writer threads": writer.num_threads(),
        "writer descriptors": len([t for t in _targets(writer.pid) if not t.endswith(".writer")]),
    }


def _targets(pid: int) -> list[str]:
    targets = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            targets.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except FileNotFoundError:
            continue  # the one that lists them
    return targets


@scenario
def restarts(path: str, count: str) -> None:
    last = int(count)

    @Wrapper(repeated_faults=None)  # equal faults on purpose
    def train(call: CallWrapper) -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        with Checkpointer(path, keep=Retention(last=2), max_in_flight=2) as checkpointer:
            state = empty()
            step = checkpointer.restore(state)
            assert step is None or same(state, own_state(step))
            session = checkpointer.session
            looks = call.iteration in (10, last)
            say(
                "began",
                iteration=call.iteration,
                step=step,
                writer=session.writer.pid,
                memories=[id(buffer.memory) for buffer in session.pool.buffers],
                held=held(session.writer) if looks else None,
            )
            step = -1 if step is None else step
            dist.barrier()
            if call.iteration % 3 == 0 or call.iteration == last:
                checkpointer.save(step + 1, own_state(step + 1)).wait(NET)
                say("committed", step=step + 1)
                step += 1
            if call.iteration < last:
                checkpointer.save(step + 1, own_state(step + 1))
                if rank == call.iteration % 2:
                    raise ValueError("a planned fault, with a save in flight")
                dist.barrier()
        dist.barrier()
        dist.destroy_process_group()

    train()


@scenario
def never_closed(path: str) -> None:
    """A new checkpointer in each iteration; only the last one is closed."""

    @Wrapper()
    def train(call: CallWrapper) -> None:
        dist.init_process_group("gloo")
        checkpointer = Checkpointer(path, max_in_flight=2)
        step = checkpointer.restore(empty())
        say("began", iteration=call.iteration, step=step)
        try:
            Checkpointer(path)
        except ValueError as e:
            say("refused", message=str(e))
        checkpointer.save(call.iteration + 1, own_state(call.iteration + 1)).wait(NET)
        dist.barrier()
        if call.iteration < 2:
            checkpointer.save(100, own_state(100))
            if dist.get_rank() == call.iteration:
                raise ValueError("a planned fault, with a save in flight")
            dist.barrier()
        dist.barrier()
        checkpointer.close()
        dist.barrier()
        dist.destroy_process_group()

    train()


class Rotate(RankAssignment):
    """After a fault, rank 0 becomes the last one: in reserve, beside `MaxActiveWorldSize`."""

    def __call__(
        self, state: State, terminated_ranks: frozenset[int]
    ) -> tuple[State, frozenset[int]]:
        state, left = ShiftRanks()(state, terminated_ranks)
        if state.iteration > 0:
            state = state.copy(rank=(state.rank - 1) % state.world_size)
        return state, left


@scenario
def rank_0_goes_into_reserve(path: str) -> None:
    @Wrapper(rank_assignment=Rotate(), rank_filter=MaxActiveWorldSize(2))
    def train(call: CallWrapper) -> None:
        dist.init_process_group("gloo")
        with Checkpointer(path) as checkpointer:
            step = checkpointer.restore(blank())
            say("began", iteration=call.iteration, rank=dist.get_rank(), step=step, pid=os.getpid())
            dist.barrier()
            checkpointer.save(call.iteration + 1, state_of(call.iteration + 1)).wait(NET)
            dist.barrier()
            if call.iteration == 0 and dist.get_rank() == 1:
                raise ValueError("a planned fault")
            dist.barrier()
        dist.destroy_process_group()

    train()


if __name__ == "__main__":
    main()

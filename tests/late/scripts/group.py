"""One rank of two with the process group of `late`: `python group.py SCENARIO`, which asserts what
must hold.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch
import torch.distributed as dist

from late import device

LATE = device.use()
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GARBAGE = torch.full((4,), 1e9)


def collectives() -> dict[str, Callable[[torch.Tensor], list[torch.Tensor]]]:
    """By name; each returns what it has written, given a tensor of the rank."""

    def in_place(call: Callable[..., Any], **options: Any) -> Callable[..., list[torch.Tensor]]:
        def made(x: torch.Tensor) -> list[torch.Tensor]:
            call(x, **options)
            return [x]

        return made

    def all_gather(x: torch.Tensor) -> list[torch.Tensor]:
        out = [torch.zeros_like(x) for _ in range(SIZE)]
        dist.all_gather(out, x)
        return out

    def all_gather_into_tensor(x: torch.Tensor) -> list[torch.Tensor]:
        out = x.new_zeros((SIZE * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x)
        return [out]

    def reduce_scatter(x: torch.Tensor) -> list[torch.Tensor]:
        out = torch.zeros_like(x)
        dist.reduce_scatter(out, [x * (to + 1) for to in range(SIZE)])
        return [out]

    def reduce_scatter_tensor(x: torch.Tensor) -> list[torch.Tensor]:
        out = torch.zeros_like(x)
        dist.reduce_scatter_tensor(out, torch.cat([x * (to + 1) for to in range(SIZE)]))
        return [out]

    def gather(x: torch.Tensor) -> list[torch.Tensor]:
        out = [torch.zeros_like(x) for _ in range(SIZE)] if RANK == 1 else None
        dist.gather(x, out, dst=1)
        return out or []

    def scatter(x: torch.Tensor) -> list[torch.Tensor]:
        out = torch.zeros_like(x)
        dist.scatter(out, [x, x + 1] if RANK == 0 else None, src=0)
        return [out]

    def exchange(x: torch.Tensor) -> list[torch.Tensor]:
        out, other = torch.zeros_like(x), 1 - RANK
        works = [dist.isend(x, other), dist.irecv(out, other)]
        for work in works:
            work.wait()
        return [out]

    return {
        "sum": in_place(dist.all_reduce),
        "max": in_place(dist.all_reduce, op=dist.ReduceOp.MAX),
        "reduce": in_place(dist.reduce, dst=0),
        "broadcast": in_place(dist.broadcast, src=1),
        **{
            each.__name__: each
            for each in (
                all_gather,
                all_gather_into_tensor,
                reduce_scatter,
                reduce_scatter_tensor,
                gather,
                scatter,
                exchange,
            )
        },
    }


def results_are_those_of_gloo() -> None:
    LATE.set_delays(RANK, 2000)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(RANK))
    for name, collective in collectives().items():
        if name == "reduce" and RANK != 0:
            collective(x.clone()), collective(x.to("late"))  # what others have is not defined
            continue
        wanted, found = collective(x.clone()), collective(x.to("late"))
        assert len(wanted) == len(found), name
        assert all(map(torch.equal, wanted, [each.cpu() for each in found])), name
    average = x.to("late").t()  # not contiguous
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    total = x.clone()
    dist.all_reduce(total)
    assert torch.equal(average.cpu(), total.t() / SIZE)
    dist.barrier()


def blocked() -> tuple[torch.Tensor, torch.Tensor, torch.Event]:
    """An all-reduce for which the other rank does not come, a copy that waits for it, and an event
    behind both. The host is ahead of all.
    """
    x = torch.ones(4).to("late")
    before = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    copied, behind = x.clone(), torch.Event("late")
    behind.record()
    assert time.monotonic() - before < 0.5
    assert not work.is_completed()
    return x, copied, behind


def the_host_runs_ahead() -> None:
    store = dist.distributed_c10d._get_default_store()
    if RANK == 1:
        store.wait(["go on"])
        dist.all_reduce(torch.ones(4).to("late"))
        dist.barrier(device_ids=[0])
        return
    _, copied, behind = blocked()
    time.sleep(0.3)
    assert not behind.query()
    store.set("go on", "")
    assert torch.equal(copied.cpu(), torch.full((4,), 2.0))
    dist.barrier(device_ids=[0])


def a_dead_peer_blocks_the_stream() -> None:
    dist.all_reduce(torch.ones(4).to("late"))
    dist.barrier(device_ids=[0])
    store = dist.distributed_c10d._get_default_store()
    if RANK == 1:
        store.wait(["behind the barrier"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("behind the barrier", "")
    queued = torch.ones(4).to("late")
    x, copied, behind = blocked()
    dist.all_reduce(queued)
    time.sleep(1)
    assert not behind.query()
    dist.group.WORLD._get_backend(torch.device("late")).abort()
    assert [torch.equal(each.cpu(), GARBAGE) for each in (x, copied, queued)] == [True] * 3
    with pytest.raises(RuntimeError, match="was aborted"):
        dist.all_reduce(x)


dist.init_process_group("cpu:gloo,late:lategloo")
globals()[sys.argv[1]]()
os.write(1, b'{"event": "passed"}\n')
dist.destroy_process_group()

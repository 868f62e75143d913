"""Counts the connections and all-reduces of all parts of the library together."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import psutil
import torch
import torch.distributed as dist
from ranks import RANK, WORLD_SIZE, join_group, leave_group, main, meet, say, scenario
from torch.utils.data import TensorDataset

from async_checkpoint.calls import work
from outlast.async_checkpoint import AsyncCallsQueue, AsyncRequest, Checkpointer
from outlast.coordination import collectives
from outlast.coordination.call_ledger import connect_ledger
from outlast.elastic import ElasticLoader, Job


def connections() -> int:
    """The number of this process's connections to the store."""
    port = int(os.environ["MASTER_PORT"])
    return sum(
        bool(each.raddr) and each.raddr.port == port
        for each in psutil.Process().net_connections("tcp")
    )


def train(path: str) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ElasticLoader(TensorDataset(torch.ones(64, 2)), global_batch_size=4)
    with (
        Job(f"{path}/job", model=model, optimizer=optimizer, loader=loader, every=2) as job,
        Checkpointer(f"{path}/checkpoints") as checkpointer,
        AsyncCallsQueue(nice=0) as queue,
    ):
        job.restore()
        for step, _ in zip(range(1, 5), loader, strict=False):
            queue.schedule_async_request(AsyncRequest(work.part, (None,), []))
            checkpointer.save(step, {"w": torch.ones(8)}).wait()
            queue.maybe_finalize_async_calls(blocking=True)
            job.step()
        say("connections", count=connections())


@scenario
def of_everything(path: str) -> None:
    least, counts = collectives.least, [0]

    def counted(*args: Any) -> int:
        counts[0] += 1
        return least(*args)

    collectives.least = counted
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Any = dist.TCPStore(address, port, WORLD_SIZE, RANK == 0)  # type: ignore[attr-defined]
    for number in range(2):  # after a restart in place, the process group has new connections
        group: Any = dist.PrefixStore(str(number), store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=group, rank=RANK, world_size=WORLD_SIZE)
        before, counts[0] = connections(), 0
        train(path)
        gc.collect()
        say("ended", all_reduces=counts[0], before=before, after=connections())
        leave_group()
    del group, store


@scenario
def waits_do_not_hold_up_each_other(_: str) -> None:
    """Rounds of two ledgers wait at the same time; the answers come in the opposite order."""
    join_group()
    first, second = connect_ledger("test").next(), connect_ledger("test").next()
    answers: list[bytes] = []
    waits = [
        threading.Thread(target=lambda each=each: answers.append(each.await_conclusion(60)))
        for each in (first, second)
    ]
    for wait in waits:
        wait.start()
    waiting = connections()
    if RANK == 0:
        second.conclude(b"second")
        waits[1].join()
        first.conclude(b"first")
    for wait in waits:
        wait.join()
    say("answers", answers=[answer.decode() for answer in answers], waiting=waiting)
    meet()
    leave_group()


main()

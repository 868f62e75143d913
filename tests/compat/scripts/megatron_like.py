"""A program with the composition of policies that Megatron's in-process restart uses: a tree of
hosts with a reserve, callbacks for an outer restarter, and a process group on a store of its own.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist

import outlast.compat.nvrx

outlast.compat.nvrx.install()
inprocess = importlib.import_module("nvidia_resiliency_ext.inprocess")

FIRST_RANK, GROUP_PORT, JOB_PORT = int(os.environ["RANK"]), int(sys.argv[2]), int(sys.argv[3])
ACTIVE = 2


def say(event: str, **fields: Any) -> None:
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def forget_everything() -> None:
    say("forgotten")


class EndsWriters(inprocess.abort.Abort):
    def __call__(self, state: inprocess.state.FrozenState) -> inprocess.state.FrozenState:
        say("writers ended", iteration=state.iteration)
        return state


def wrap(train: Any) -> Any:
    rank_assignment = inprocess.rank_assignment
    reserve = rank_assignment.LayerFlag.RESERVE
    layers = [rank_assignment.Layer(min_ranks=ACTIVE, max_ranks=ACTIVE, flag=reserve)]
    layers.append(
        rank_assignment.Layer(
            min_ranks=1, max_ranks=8, key_or_fn=lambda _: socket.gethostname(), flag=reserve
        )
    )
    restarter = inprocess.nested_restarter
    return inprocess.Wrapper(
        store_kwargs={"timeout": timedelta(seconds=300), "port": JOB_PORT},
        initialize=inprocess.Compose(
            inprocess.initialize.RetryController(min_world_size=ACTIVE),
            restarter.NestedRestarterHandlingCompleted(),
        ),
        abort=inprocess.Compose(
            inprocess.abort.AbortTransformerEngine(),
            inprocess.abort.AbortTorchDistributed(),
            EndsWriters(),
            restarter.NestedRestarterHandlingStarting(),
        ),
        completion=restarter.NestedRestarterFinalized(),
        terminate=restarter.NestedRestarterAborted(),
        health_check=inprocess.health_check.CudaHealthCheck(timeout=timedelta(seconds=10)),
        rank_assignment=rank_assignment.Tree(layers=layers),
        finalize=inprocess.Compose(
            inprocess.finalize.ThreadedFinalize(timedelta(seconds=10), fn=forget_everything),
            inprocess.finalize.ThreadedFinalize(timedelta(seconds=10), fn=torch.cuda.empty_cache),
        ),
        heartbeat_interval=timedelta(seconds=1),
        heartbeat_timeout=timedelta(seconds=30),
        barrier_timeout=timedelta(seconds=120),
        completion_timeout=timedelta(seconds=120),
        monitor_process_interval=timedelta(seconds=1),
        monitor_thread_interval=timedelta(seconds=1),
        last_call_wait=timedelta(seconds=1),
        soft_timeout=timedelta(seconds=60),
        hard_timeout=timedelta(seconds=90),
        termination_grace_time=timedelta(seconds=1),
        enabled=True,
    )(train)


def pretrain(store: Any, inprocess_call_wrapper: Optional[Any] = None) -> int:  # noqa: UP045
    """Rank 0 raises at iteration 0; rank 1 is killed at iteration 1."""
    call = inprocess_call_wrapper
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    say("entered", iteration=call.iteration, rank=rank, size=size)
    named = dist.PrefixStore(str(call.iteration), store)
    dist.init_process_group("gloo", store=named, rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    if call.iteration < 2 and rank == call.iteration:
        if rank == 0:
            raise ValueError("a planned fault")
        os.kill(os.getpid(), signal.SIGKILL)
    if call.iteration < 2:
        threading.Event().wait()
    dist.barrier()
    dist.destroy_process_group()
    return int(total)


def main() -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("outlast.compat.nvrx").setLevel(logging.INFO)
    train = wrap(pretrain)
    store = dist.TCPStore(
        host_name="127.0.0.1",
        port=GROUP_PORT,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=FIRST_RANK == 0,
        timeout=timedelta(seconds=300),
        wait_for_workers=True,
    )
    say("returned", value=train(store))


if __name__ == "__main__":
    main()

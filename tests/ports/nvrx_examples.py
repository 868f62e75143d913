"""Programs of the shape that nvidia-resiliency-ext shows in its examples, on CPUs.

    outlast run --nproc-per-node 2 nvrx_examples.py basic|advanced

`basic` wraps all of the program. `advanced` wraps the training loop: the model, the optimizer and
the store are made once. Both save with `torch.save` in the background.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist

import outlast.compat.nvrx

outlast.compat.nvrx.install()
inprocess = importlib.import_module("nvidia_resiliency_ext.inprocess")
torch_ckpt = importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt")
STEPS, HOLD = 60, 42  # steps; after this one, until there is a file `go`
CHECKPOINT = Path("checkpoint.pt")
Call = Optional[inprocess.CallWrapper]  # type: ignore[name-defined] # noqa: UP045
PORT = int(os.environ["MASTER_PORT"])


def open_store(port: int) -> dist.TCPStore:
    return dist.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=port,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=int(os.environ["RANK"]) == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: Any, call: Any) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    saves = torch_ckpt.TorchAsyncCheckpoint(persistent_queue=False)
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    else:  # a fault before the first checkpoint
        model.load_state_dict(make()[0].state_dict())
        optimizer.load_state_dict(torch.optim.Adam(model.parameters(), lr=1e-3).state_dict())
    while step < STEPS:
        if step == HOLD and not Path("go").exists():
            time.sleep(0.1)
            continue
        step += 1
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.rand(16, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item()!r}", flush=True)
        if step == 10 and rank == call.iteration == 0 and "undisturbed" not in sys.argv:
            raise RuntimeError("an example fault")
        if step % 5 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            new = f"new.{rank}.pt"
            saves.async_save(state, new)
            saves.finalize_async_save(blocking=True, no_dist=True)
            dist.barrier()
            if rank == 0:
                with call.atomic():
                    os.replace(new, CHECKPOINT)
            dist.barrier()
    saves.close()
    dist.destroy_process_group()


@inprocess.Wrapper(
    store_kwargs={"port": PORT + 1}, health_check=inprocess.health_check.CudaHealthCheck()
)
def basic(call_wrapper: Call = None) -> None:
    assert call_wrapper is not None
    loop(*make(), open_store(PORT + 2 + call_wrapper.iteration), call_wrapper)


def advanced() -> None:
    def train(base: Any, model: Any, optimizer: Any, call_wrapper: Call = None) -> None:
        assert call_wrapper is not None
        store = dist.PrefixStore(str(call_wrapper.iteration), base)
        loop(model, optimizer, store, call_wrapper)

    restarter = inprocess.nested_restarter
    wrapped = inprocess.Wrapper(
        store_kwargs={"port": PORT + 1},
        health_check=inprocess.health_check.CudaHealthCheck(),
        initialize=restarter.NestedRestarterHandlingCompleted(),
        abort=inprocess.Compose(
            inprocess.abort.AbortTorchDistributed(), restarter.NestedRestarterHandlingStarting()
        ),
        completion=restarter.NestedRestarterFinalized(),
        terminate=restarter.NestedRestarterAborted(),
    )(train)
    wrapped(open_store(PORT + 2), *make())


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"basic": basic, "advanced": advanced}[sys.argv[1]]()

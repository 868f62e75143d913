"""Trains under the in-process restart of Megatron-LM, with its policies and its process groups.

    outlast run --nproc-per-node 3 megatron_training.py FOLDER --inprocess-restart ...

FOLDER has Megatron-core. Megatron's own `pretrain` needs a GPU: the function below takes its place,
with the two parameters that in-process restart uses.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import outlast.compat.nvrx

outlast.compat.nvrx.install()
sys.path.insert(0, sys.argv.pop(1))
STEPS, HOLD = 80, 62  # steps; after this one, until there is a file `go`
CHECKPOINT = Path("model.pt")


def pretrain(store: Any, inprocess_call_wrapper: Any = None) -> None:
    call = inprocess_call_wrapper
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own_store = dist.PrefixStore(f"iteration {call.iteration}", store)
    dist.init_process_group("gloo", store=own_store, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel()  # destroyed by the policy `finalize`
    group = parallel_state.get_data_parallel_group()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    while step < STEPS:
        call.ping()
        if step == HOLD and not Path("go").exists():
            time.sleep(0.1)
            continue
        step += 1
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(8, 8, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.data.sub_(parameter.grad, alpha=0.005)
        dist.all_reduce(loss.detach(), group=group)
        print(f"step {step}: loss {loss.item()!r}", flush=True)
        if rank == 0 and step % 5 == 0:
            torch.save({"model": model.state_dict(), "step": step}, "new.pt")
            os.replace("new.pt", CHECKPOINT)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    restart = importlib.import_module("megatron.training.inprocess_restart")
    wrapped, opened = restart.maybe_wrap_for_inprocess_restart(pretrain)
    print("ready", flush=True)
    wrapped(opened)

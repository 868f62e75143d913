"""One rank of a wrapped training that augments its samples in workers: `python same_bits.py PLAN`.

The plan is JSON; its faults are those of `planned_faults`, at `forward N` and `done N` of step N.
`ddp` are arguments of DDP; with `late`, it wraps the model after the state was restored. `data` is
`torch` (a `DataLoader`), `persistent` (its workers persist), or `elastic` (an `ElasticLoader`).
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast
from outlast import inprocess
from outlast.elastic import ElasticLoader
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

PLAN: dict[str, Any] = {"data": "torch", "late": False, "hook": False, "ddp": {}, "job": {}}
PLAN.update(json.loads(sys.argv[1]))
EPOCHS, SAMPLES = 2, 72
reach = PlannedFaults(PLAN, {}).reach


class Augmented(Dataset[torch.Tensor]):
    """Samples with noise of each generator; some draw more than others."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(2 + index % 3)[:1] + random.random() + np.random.rand()
        return torch.sin(torch.arange(8.0) * (index + 1)) + noise


class Model(nn.Module):
    """Its layers are used in another order than they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(48, 1)
        self.middle = nn.ModuleList([nn.Linear(48, 48) for _ in range(4)])
        self.first = nn.Linear(8, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in reversed(self.middle):
            x = torch.tanh(layer(x))
        return nn.functional.dropout(self.last(x), 0.1)


def data() -> Any:
    size = dist.get_world_size()
    if PLAN["data"] == "elastic":
        return ElasticLoader(Augmented(), global_batch_size=4 * size, seed=3, num_workers=2)
    return DataLoader(
        Augmented(),
        4,
        sampler=DistributedSampler(Augmented(), seed=3),
        num_workers=2,
        persistent_workers=PLAN["data"] == "persistent",
    )


def parallel(model: nn.Module) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **PLAN["ddp"])
    if PLAN["hook"]:
        ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


@inprocess.Wrapper(rank_assignment=Compose(ShiftRanks(), AwaitReplacements(60)))
def train(call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model: nn.Module = Model()
    loader = data()
    called = model if PLAN["late"] else parallel(model)
    if PLAN["late"]:
        torch.manual_seed(0)
        model.load_state_dict(Model().state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with outlast.Job(
        PLAN["path"],
        model=called,
        optimizer=optimizer,
        loader=loader if PLAN["data"] == "elastic" else None,
        every=4,
        **PLAN["job"],
    ) as job:
        step, size = job.restore(), dist.get_world_size()
        say("restored", step=step, source=job.restored_from, iteration=call.iteration, size=size)
        if PLAN["late"]:
            called = parallel(model)
            job.watch_ddp(called)
        for _ in job.epochs(EPOCHS):
            for inputs in job.batches(loader):
                if job.steps == 4:
                    job.checkpointer.wait()  # in every run, the save of this step is committed
                call.ping()
                step = job.steps + 1
                reach(f"forward {step}", call.iteration)
                loss = called(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                content = hashlib.sha256(inputs.numpy().tobytes()).hexdigest()[:16]
                said = f"{content} {loss.item().hex()}"
                say("trained", step=step, iteration=call.iteration, loss=said)
                job.step()
                reach(f"done {step}", call.iteration)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    say("ended", state=train())

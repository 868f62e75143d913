"""One rank of a wrapped training of several models: `python gan.py PLAN`.

A generator and a discriminator, each with an optimizer, learn from a frozen teacher; `ema` is an
average of the generator. The plan is JSON; its `faults` are those of `planned_faults`. The points
of step N, in their order: `loaded N`; `d zeroed N`; `d computed N`; `d stepped N`; `g computed N`;
`g stepped N`; `averaged N` (before `job.step`); `done N`. `kind` is one of:

`ddp`: each step begins with `zero_grad`, so the generator's backward pass leaves gradients in the
discriminator. `cleared`: they are discarded before `job.step`. `accumulate`: the optimizer of the
discriminator steps after every second step of the job. `fsdp`: all models are sharded.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import outlast
from outlast import inprocess
from outlast.elastic import ElasticLoader
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

PLAN: dict[str, Any] = {"epochs": 2, "every": 4, "kind": "ddp", "job": {}, "faults": []}
PLAN.update(json.loads(sys.argv[1]))
KIND = PLAN["kind"]
PARTS: dict[str, Any] = {}


def write() -> None:
    """Changes the average between two steps."""
    with torch.no_grad():
        next(PARTS["ema"].parameters())[0] += 1.0


reach = PlannedFaults(PLAN, {"write": write}).reach


def build() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        "g": nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 4)),
        "d": nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1)),
        "teacher": nn.Linear(4, 3).requires_grad_(False),
    }
    if KIND == "fsdp":
        made["ema"] = copy.deepcopy(made["g"])
        return {name: fully_shard(each) for name, each in made.items()}
    made["ema"] = AveragedModel(made["g"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    made |= {name: DistributedDataParallel(made[name]) for name in ("g", "d")}
    return made


@torch.no_grad()
def average(ema: Any, g: Any) -> None:
    if isinstance(ema, AveragedModel):
        ema.update_parameters(g.module)
    else:
        for mean, new in zip(ema.parameters(), g.parameters(), strict=True):
            mean.lerp_(new, 0.1)


def content(optimizers: dict[str, torch.optim.Optimizer], module: nn.Module) -> str:
    """A digest of all parameters, buffers and moments."""
    moments = [
        each[name]
        for optimizer in optimizers.values()
        for each in optimizer.state_dict()["state"].values()
        for name in sorted(each)
    ]
    found = hashlib.sha256()
    for value in [*module.state_dict().values(), *moments]:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


@inprocess.Wrapper(rank_assignment=Compose(ShiftRanks(), AwaitReplacements(60)))
def train(call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    random.seed(dist.get_rank())
    models = build()
    PARTS.update(models)
    g, d, teacher = models["g"], models["d"], models["teacher"]
    optimizers: dict[str, Any] = {
        "g": torch.optim.Adam(g.parameters(), lr=0.01, betas=(0.5, 0.999)),
        "d": torch.optim.SGD(d.parameters(), lr=0.05, momentum=0.9),
    }
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    loader = ElasticLoader(TensorDataset(x), global_batch_size=16, seed=3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers["g"], 0.95)
    job = outlast.Job(
        PLAN["path"],
        model=models,
        optimizer=optimizers,
        loader=loader,
        states={"scheduler": scheduler},
        every=PLAN["every"],
        **PLAN["job"],
    )
    with job:
        step = job.restore()
        say(
            "restored",
            step=step,
            source=job.restored_from,
            iteration=call.iteration,
            state=content(optimizers, job.module),
        )
        for _ in job.epochs(PLAN["epochs"]):
            for (real,) in job.batches(loader):
                if job.steps == 4:
                    job.checkpointer.wait()  # in every run, the save of this step is committed
                call.ping()
                step = job.steps + 1
                reach(f"loaded {step}", call.iteration)
                accumulates = KIND == "accumulate" and step % 2 == 1
                if KIND != "accumulate" or accumulates:
                    optimizers["d"].zero_grad()
                reach(f"d zeroed {step}", call.iteration)
                with torch.no_grad():
                    fake = g(torch.randn(len(real), 4))
                wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
                judged = d(torch.cat([real + 0.01 * random.random(), fake]))
                d_loss = nn.functional.binary_cross_entropy_with_logits(judged, wanted)
                (loader.weight * d_loss).backward()
                reach(f"d computed {step}", call.iteration)
                if not accumulates:
                    optimizers["d"].step()
                reach(f"d stepped {step}", call.iteration)
                optimizers["g"].zero_grad()
                if KIND == "accumulate":
                    d.requires_grad_(False)
                made = g(torch.randn(len(real), 4))
                judged = (d.module if KIND == "accumulate" else d)(made)
                near = (teacher(made) - teacher(real)).square().mean()
                g_loss = nn.functional.softplus(-judged).mean() + near
                (loader.weight * g_loss).backward()
                d.requires_grad_(True)
                reach(f"g computed {step}", call.iteration)
                optimizers["g"].step()
                scheduler.step()
                if KIND == "cleared":
                    d.zero_grad()
                reach(f"g stepped {step}", call.iteration)
                average(models["ema"], g)
                loss = f"{d_loss.item().hex()} {g_loss.item().hex()}"
                say("trained", step=step, iteration=call.iteration, loss=loss)
                reach(f"averaged {step}", call.iteration)
                job.step()
                reach(f"done {step}", call.iteration)
        return content(optimizers, job.module)


if __name__ == "__main__":
    torch.set_num_threads(1)
    say("ended", state=train())

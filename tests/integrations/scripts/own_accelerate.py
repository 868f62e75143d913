"""A program of a user of accelerate: `outlast run own_accelerate.py PLAN`, see `own_programs.py`.

Its points: `step N`, in front of step N; `stepped N`, after the optimizer's step; `evaluation E`.
"""

import json
import random
import sys
from typing import Any

import torch
from accelerate import Accelerator
from planned_faults import RANK, PlannedFaults, say
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from outlast import inprocess
from outlast.elastic import ElasticLoader
from outlast.integrations.accelerate import make_job, reset_state

PLAN = json.loads(sys.argv[1])
EPOCHS, STEPS = 4, 8
reach = PlannedFaults(PLAN, {}).reach


def computed(name: str, *values: Any) -> None:
    say("computed", name=name, value=values)


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper) -> None:
    reset_state()
    torch.manual_seed(0)
    x = torch.randn(256, 20)
    y = (x[:, :4].sum(1) > 0).long()
    random.seed(RANK)
    loader = ElasticLoader(TensorDataset(x, y), global_batch_size=256 // STEPS)
    accelerator = Accelerator(cpu=True)
    model: nn.Module = nn.Sequential(nn.Linear(20, 16), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    length = EPOCHS * STEPS
    schedulers = torch.optim.lr_scheduler
    scheduler: Any = schedulers.LinearLR(optimizer, 1.0, 0.1, total_iters=length)
    plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.3)
    accelerator.register_for_checkpointing(plateau)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with make_job(accelerator, PLAN["path"], loader=loader, every=100) as job:
        accelerator.load_state()
        say("restored", step=job.steps, source=job.restored_from)
        for epoch in job.epochs(EPOCHS):
            for inputs, labels in job.batches(loader):
                call.ping()
                step = job.steps + 1
                reach(f"step {step}", call.iteration)
                loss = functional.cross_entropy(model(inputs), labels) + 0.01 * random.random()
                accelerator.backward(loader.weight * loss)
                optimizer.step()
                reach(f"stepped {step}", call.iteration)
                scheduler.step()
                optimizer.zero_grad()
                if not PLAN.get("resized"):  # the shares of the ranks differ then
                    computed(f"step {step}", loss.item())
                job.step()
            model.eval()
            reach(f"evaluation {epoch}", call.iteration)
            with torch.no_grad():
                loss = functional.cross_entropy(model(x), y)
            random.random()
            plateau.step(loss.item())
            model.train()
            if not PLAN.get("resized"):
                computed(f"evaluation {epoch}", loss.item(), optimizer.param_groups[0]["lr"])
    computed("scheduler", scheduler.scheduler.last_epoch)
    if not PLAN.get("resized"):
        weights = sum(p.double().sum().item() for p in model.parameters()).hex()
        computed("end", weights, random.random())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""A program of a user of Lightning Fabric: `outlast run own_fabric.py PLAN`, see `own_programs.py`.

Its points: `step N`, in front of step N; `stepped N`, after the optimizer's step.
"""

import json
import os
import sys
from typing import Any

import torch
from lightning.fabric import Fabric
from planned_faults import PlannedFaults, say
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import outlast
from outlast import inprocess

PLAN = json.loads(sys.argv[1])
reach = PlannedFaults(PLAN, {}).reach


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper) -> None:
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), 1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    with outlast.Job(PLAN["path"], model=model, optimizer=optimizer, every=100) as job:
        job.restore()
        say("restored", step=job.steps, source=job.restored_from)
        for _ in job.epochs(2):
            for inputs, targets in job.batches(loader):
                call.ping()
                step = job.steps + 1
                reach(f"step {step}", call.iteration)
                loss = functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                reach(f"stepped {step}", call.iteration)
                say("computed", name=f"step {step}", value=loss.item())
                job.step()
    say("computed", name="weights", value=[p.sum().item() for p in model.parameters()])


if __name__ == "__main__":
    main()

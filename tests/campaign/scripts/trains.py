"""A user's script, which knows of no fault. Arguments: its checkpoints, and what is wrong."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast
from outlast import inprocess


@inprocess.Wrapper(soft_timeout=10, hard_timeout=15)
def train(checkpoints: str, wrong: str, call: inprocess.CallWrapper | None = None) -> None:
    assert call is not None
    dist.init_process_group("gloo")
    torch.manual_seed(os.getpid() if wrong == "unseeded" else 0)
    inputs = torch.randn(480, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with outlast.Job(checkpoints, model=model, optimizer=optimizer, every=20) as job:
        job.restore()
        if wrong == "restart" and call.iteration:
            with torch.no_grad():
                model.module.bias += 1
        for _ in job.epochs(1):
            for features, targets in job.batches(loader):
                loss = nn.functional.mse_loss(model(features), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                job.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(*sys.argv[1:])

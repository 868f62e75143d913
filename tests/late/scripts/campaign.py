r"""A training on the device `late` for a campaign of faults, as a user's script:

outlast chaos campaign --faults 200 --nproc-per-node 2 -- \
    tests/late/scripts/campaign.py '{folder}/checkpoints'
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import outlast
from late import device
from outlast import inprocess
from outlast.elastic import ElasticLoader

STEPS = 120
os.environ.setdefault(device.DELAYS, f"{os.environ['RANK']}:300")
device.use()


def dataset() -> TensorDataset:
    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.square().sum(dim=1, keepdim=True))


@inprocess.Wrapper(soft_timeout=3, hard_timeout=5, termination_grace_time=1, repeated_faults=None)
def train(call: inprocess.CallWrapper) -> None:
    dist.init_process_group("cpu:gloo,late:lategloo")
    torch.manual_seed(0)
    layers = [nn.Linear(32, 128), nn.Dropout(0.2), nn.Tanh(), nn.Linear(128, 1)]
    model = nn.Sequential(*layers).to("late")
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    loader = ElasticLoader(dataset(), global_batch_size=32, seed=7)
    with outlast.Job(
        sys.argv[1], model=model, optimizer=optimizer, loader=loader, every=5, linger=10
    ) as job:
        job.restore()
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-3, find_unused_parameters=True)
        while job.steps < STEPS:
            for x, y in loader:
                call.ping()
                loss = nn.functional.mse_loss(ddp(x.to("late")), y.to("late"))
                (loader.weight * loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                with call.long_phase():  # a save waits for the one before it
                    job.step()
                if job.steps >= STEPS:
                    break
    dist.destroy_process_group()


torch.set_num_threads(1)
train()

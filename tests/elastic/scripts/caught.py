"""A loss spike: the program catches its own exception, and restores, in the same iteration."""

from __future__ import annotations

import contextlib
import sys

import torch
from planned_faults import say

import outlast
from outlast import inprocess


class SpikeError(Exception):
    """The loss is too high."""


@inprocess.Wrapper()
def train() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for attempt in (1, 2):
        job = outlast.Job(sys.argv[1], model=net, optimizer=optimizer, every=None)
        with contextlib.suppress(SpikeError), job:
            say("restored", step=job.restore(), source=job.restored_from)
            while job.steps < 5:
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                job.step()
                if job.steps == 2:
                    job.save().wait(60)
                if attempt == 1 and job.steps == 3:
                    raise SpikeError


train()

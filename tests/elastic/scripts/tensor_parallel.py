"""One rank of a wrapped training with tensor parallelism and replicas: `tensor_parallel.py PLAN`.

The plan is JSON; its faults are those of `planned_faults`. The ranks are replicas x 2 parts. The
points of step N: `forward N`; `computed N` and `exchanged N`, before and after the exchange of the
gradients between replicas; `done N`. Without `await`, nothing replaces a rank that is lost.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import outlast
from outlast import inprocess
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

PLAN: dict[str, Any] = {"steps": 12, "faults": [], "await": True}
PLAN.update(json.loads(sys.argv[1]))
reach = PlannedFaults(PLAN, {}).reach


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


WAITS = [AwaitReplacements(60)] if PLAN["await"] else []


@inprocess.Wrapper(rank_assignment=Compose(ShiftRanks(), *WAITS))
def train(call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    with outlast.Job(PLAN["path"], model=model, optimizer=optimizer, every=4) as job:
        step = job.restore()
        say("restored", step=step, source=job.restored_from, iteration=call.iteration)
        while job.steps < PLAN["steps"]:
            call.ping()
            step = job.steps + 1
            reach(f"forward {step}", call.iteration)
            generator = torch.Generator().manual_seed(100 * step + mesh.get_local_rank("dp"))
            inputs = torch.randn(8, 4, generator=generator)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()
            reach(f"computed {step}", call.iteration)
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(local(parameter.grad), group=mesh.get_group("dp"))
            reach(f"exchanged {step}", call.iteration)
            optimizer.step()
            optimizer.zero_grad()
            say("trained", step=step, iteration=call.iteration, loss=loss.item().hex())
            job.step()
            reach(f"done {step}", call.iteration)
            if job.steps == 4:
                job.checkpointer.wait()
    moments = [v for each in optimizer.state.values() for v in each.values()]
    return repr([local(each.detach()).tolist() for each in [*model.parameters(), *moments]])


if __name__ == "__main__":
    torch.set_num_threads(1)
    say("ended", state=train())

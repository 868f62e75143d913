"""One rank of a wrapped training on the device `late`: `python live.py PLAN`, as `elastic/scripts`.
On a GPU with another `device` and `backend`.

DDP and FSDP reduce their gradients in the process group of the device: the host runs ahead of them,
and an abort leaves garbage (`cpp/group.cpp`). The points of step N: `forward N`, `reducing N` (in
the backward pass: the gradients of the last layer are being reduced), `computed N` (the reduction
of all is queued), `stepped N`, `measured N` (before `job.step`), `noted N` (after it), `done N`.
`forward N 1` and `computed N 1` are those of the second micro-batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "elastic/scripts"))

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import outlast
from gpu.sharing import own_index
from late import device, orderings
from outlast import inprocess
from outlast.inprocess import Compose
from outlast.inprocess.interruption.interrupter import AtomicSection
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks
from outlast.inprocess.read_lease import ReadLease

PLAN: dict[str, Any] = {
    "steps": 8,
    "every": 100,
    "device": "late",
    "backend": "lategloo",
    "own_device": False,
    "kind": "ddp",
    "micro": 1,
    "ema": False,
    "scaler": False,
    "optimizer": {},
    "guard": False,
    "metric": False,
    "timeouts": {},
    "job": {},
    "deaf": False,
    "nccl": False,
    "untold": False,
    "faults": [],
}
PLAN.update(json.loads(sys.argv[1]))
if PLAN["deaf"]:
    os.environ["LATE_PEERS_END"] = "1"
if PLAN["device"] == "late":
    LATE = device.use()
orderings.remove_asked()
STEPPED = threading.Event()
GATES = contextlib.ExitStack()


def hold() -> None:
    """The stream waits for a second and a half: longer than an abort, shorter than a limit."""
    GATES.enter_context(device.held())
    threading.Timer(1.5, GATES.close).start()


ACTIONS = {"pause": lambda: time.sleep(0.5), "stepped": STEPPED.set, "hold": hold}
reach = PlannedFaults(PLAN, ACTIONS).reach


def deafen() -> None:
    """Rank 0 hears of a restart when it has made a step with what the abort of its peer has left
    of the gradients; or after a while, if it makes none.
    """
    begin = AtomicSection.begin_termination

    def late(section: AtomicSection) -> None:
        STEPPED.wait(2.0)
        begin(section)

    setattr(AtomicSection, "begin_termination", late)  # noqa: B010


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 1)]
    model = nn.Sequential(*layers).to(PLAN["device"])
    size = dist.get_world_size()
    if PLAN["kind"] != "ddp":
        shape, names = ((size,), ("s",)) if PLAN["kind"] == "fsdp" else ((2, size // 2), ("r", "s"))
        fully_shard(model, mesh=init_device_mesh(PLAN["device"], shape, mesh_dim_names=names))
    return model


def parallel(model: nn.Module) -> nn.Module:
    """With a bucket for each layer; in the same order in each iteration, so that the gradients of
    more than two ranks are added in the same order.
    """
    if PLAN["kind"] != "ddp":
        return model
    return DistributedDataParallel(model, bucket_cap_mb=1e-3, find_unused_parameters=True)


class Metric:
    """The sum of the losses of all ranks and steps, which stays on the device."""

    def __init__(self) -> None:
        self._sum = torch.zeros((), device=PLAN["device"])

    def add(self, loss: torch.Tensor) -> None:
        of_all = loss.detach().clone()
        dist.all_reduce(of_all)
        self._sum += of_all

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum.copy_(state["sum"])


def is_spike(model: nn.Module) -> bool:
    """Whether the gradients are so large that the step is left out, as a `GradScaler` does."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return bool(torch.stack([each.norm() for each in gradients]).norm() > 1e6)


def content(values: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for value in values:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(whole.detach().cpu().numpy().tobytes())
    return found.hexdigest()


@inprocess.Wrapper(rank_assignment=Compose(ShiftRanks(), AwaitReplacements(60)), **PLAN["timeouts"])
def train(call: inprocess.CallWrapper) -> None:
    if PLAN["own_device"] or PLAN["backend"] == "nccl":
        torch.accelerator.set_device_index(own_index())
    dist.init_process_group(f"cpu:gloo,{PLAN['device']}:{PLAN['backend']}")
    if PLAN["nccl"]:  # the group seems to be one of NCCL
        dist.distributed_c10d._world.pg_backend_config[dist.group.WORLD] += ",cuda:nccl"
    rank = dist.get_rank()
    if PLAN["deaf"] and rank == 0:
        deafen()
    if PLAN["untold"]:
        setattr(ReadLease, "recall", lambda _: None)  # noqa: B010
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **PLAN["optimizer"])
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if PLAN["ema"] else None
    # Step 2 and some after it are skipped: their gradients are infinite with this scale.
    weight = 100 if PLAN["scaler"] else 1
    scaler = torch.amp.GradScaler(PLAN["device"], init_scale=2.0**127, enabled=PLAN["scaler"])
    metric = Metric() if PLAN["metric"] else None
    kept = {"ema": ema, "metric": metric, "scaler": scaler if PLAN["scaler"] else None}
    states = {name: each for name, each in kept.items() if each is not None}
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1 + rank))
    torch.manual_seed(100 + rank)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "states": states}
    with outlast.Job(PLAN["path"], **parts, every=PLAN["every"], **PLAN["job"]) as job:
        step = job.restore()
        say("restored", step=step, source=job.restored_from, iteration=call.iteration)
        called = parallel(model)
        model[3].weight.register_post_accumulate_grad_hook(
            lambda _: reach(f"reducing {job.steps + 1}", call.iteration)
        )
        while job.steps < PLAN["steps"]:
            call.ping()
            step = job.steps + 1
            optimizer.zero_grad()
            for micro in range(PLAN["micro"]):
                point = f"{step} {micro}" if micro else str(step)
                reach(f"forward {point}", call.iteration)
                last = micro == PLAN["micro"] - 1
                with contextlib.nullcontext() if last else called.no_sync():
                    loss = called((x * (step + micro)).to(PLAN["device"])).square().mean()
                    scaler.scale(weight * loss).backward()
                reach(f"computed {point}", call.iteration)
            if PLAN["guard"] and is_spike(model):
                optimizer.zero_grad()
            else:
                scaler.step(optimizer)
                scaler.update()
            if ema is not None:
                ema.update_parameters(model)
            reach(f"stepped {step}", call.iteration)
            if metric is not None:
                metric.add(loss)
            reach(f"measured {step}", call.iteration)
            job.step()
            reach(f"noted {step}", call.iteration)
            say("trained", step=step, loss=loss.item().hex(), scale=scaler.get_scale())
            reach(f"done {step}", call.iteration)
        tensors = [*model.parameters(), *(ema.parameters() if ema else [])]
        tensors += metric.state_dict().values() if metric else []
        say("ended", state=content(tensors))
        if PLAN["own_device"]:
            say("contexts", opened=LATE.contexts())
        dist.barrier()
    dist.destroy_process_group()


train()

"""One rank of a wrapped training whose faults come at every point of a step: `python live.py PLAN`.

The plan is JSON; its `faults` are those of `planned_faults`. The points of step N: `forward N`;
`computed N` (the gradients are there); `torn N` (the optimizer has changed one parameter);
`stepped N` (before `job.step`); `done N`. Others: `end E` (of an epoch), `begin`, `restored`,
`chosen` (the ranks have agreed on the state from which they continue), and `transfer` (between two
parcels, or two reads of another process's memory), `last save` (before the job ends), `reshard`
(before a save for ranks of another number). With
`"over": "group"`, no memory is read. Without `"await"`, nothing replaces a rank that is lost.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import outlast
from outlast import chaos, inprocess
from outlast.elastic import ElasticLoader
from outlast.elastic.job.live import rescue, same_host, to_save, transfer
from outlast.elastic.job.restoring import Restoring
from outlast.errors import CheckpointError
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

PLAN: dict[str, Any] = {"epochs": 2, "every": 4, "kind": "ddp", "kept": False, "over": "memory"}
PLAN.update({"job": {}, "faults": [], "await": True})
PLAN.update(json.loads(sys.argv[1]))
BUILT: list[tuple[nn.Module, Any, torch.optim.Optimizer]] = []
MODEL: list[nn.Module] = []
JOB: list[Any] = []


def write() -> None:
    """Changes a parameter beside the optimizer."""
    next(MODEL[0].parameters()).data[0] += 0  # not counted
    with torch.no_grad():
        next(MODEL[0].parameters())[0] += 1.0


def swap() -> None:
    """As a validation with an average of the weights does."""
    for parameter in MODEL[0].parameters():
        parameter.data.mul_(0.5)  # not counted


def spoil() -> None:
    next(MODEL[0].parameters()).data[0] = float("nan")


def refuse() -> None:
    raise CheckpointError("a planned refusal")


ACTIONS = {"write": write, "swap": swap, "lose": lambda: chaos.fire("lost_shared_memory")}
ACTIONS |= {"spoil": spoil, "refuse": refuse}
reach = PlannedFaults(PLAN, ACTIONS).reach


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, parameter by parameter, with a point after the first."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for number, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                moments = self.state[parameter]
                if not moments:
                    moments["momentum"] = torch.zeros_like(parameter)
                moments["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(moments["momentum"] * group["lr"])
            if number == 0:
                reach(f"torn {JOB[0].steps + 1}", JOB[1])


def build() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """The model that is saved, the one that is called, and the optimizer."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 32), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
    if PLAN["kind"] == "ddp":
        layers.insert(1, nn.BatchNorm1d(32))
    model = nn.Sequential(*layers)
    if PLAN["kind"] in ("fsdp", "hsdp"):
        size = dist.get_world_size()
        is_hybrid = PLAN["kind"] == "hsdp" and size % 2 == 0
        shape, names = ((2, size // 2), ("r", "s")) if is_hybrid else ((size,), ("s",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model, mesh=mesh)
        return model, model, torch.optim.Adam(model.parameters(), lr=0.01)
    return model, None, Momentum(model.parameters())


def content(values: Any) -> str:
    found = hashlib.sha256()
    for value in values:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def received() -> None:
    """A point in a transfer; parcels are small here."""
    if PLAN["over"] == "group":
        same_host.reader = transfer.reader = lambda: [0, 0]
    lend, read_memory = transfer.lent, same_host.OwnersMemory._read
    pieces = []

    def lent(*args: Any) -> Any:
        if PLAN["over"] == "memory":
            reach("transfer", JOB[1])
        return lend(*args)

    def read(memory: Any, *piece: Any) -> None:
        pieces.append(piece)
        if len(pieces) == 3:  # the first is the token
            reach("transfer", JOB[1])
        read_memory(memory, *piece)

    transfer.lent, same_host.OwnersMemory._read = lent, read  # type: ignore[method-assign]
    transfer._PARCEL_BYTES = 512
    gathered = transfer.gathered
    parcels = []

    load = Restoring._load_from_ranks

    def chosen(restoring: Restoring, choice: Any) -> Any:
        reach("chosen", JOB[1])
        return load(restoring, choice)

    Restoring._load_from_ranks = chosen

    def counted(views: Any, parcel: Any) -> Any:
        parcels.append(parcel)
        if len(parcels) == 3:
            reach("transfer", JOB[1])
        return gathered(views, parcel)

    transfer.gathered = counted
    last, resharded = rescue.collect, to_save.state_to_save

    def collected(*args: Any) -> Any:
        reach("last save", JOB[1])
        return last(*args)

    def made_to_reshard(*args: Any) -> Any:
        reach("reshard", JOB[1])
        return resharded(*args)

    rescue.collect, to_save.state_to_save = collected, made_to_reshard


# Torch 2.6 has no such option.
HAS_INIT_SYNC = "init_sync" in inspect.signature(DistributedDataParallel).parameters
WAITS = [AwaitReplacements(60)] if PLAN["await"] else []


@inprocess.Wrapper(rank_assignment=Compose(ShiftRanks(), *WAITS))
def train(call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    JOB[:] = [None, call.iteration]
    reach("begin", call.iteration)
    random.seed(dist.get_rank())
    if not BUILT or not PLAN["kept"]:
        BUILT[:] = [build()]
    model, called, optimizer = BUILT[0]
    MODEL[:] = [model]
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = ElasticLoader(dataset, global_batch_size=16, seed=3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    parts["states"] = {"scheduler": scheduler}
    with outlast.Job(PLAN["path"], **parts, every=PLAN["every"], **PLAN["job"]) as job:
        JOB[:] = [job, call.iteration]
        step = job.restore()
        say("restored", step=step, source=job.restored_from, iteration=call.iteration, size=size)
        reach("restored", call.iteration)
        known = PLAN["kept"] and step is not None
        sync = {"init_sync": not known} if HAS_INIT_SYNC else {}
        called = called or DistributedDataParallel(model, **sync)
        if isinstance(called, DistributedDataParallel):
            job.watch_ddp(called)  # with three ranks, their order changes the bits
        for epoch in job.epochs(PLAN["epochs"]):
            for inputs, targets in job.batches(loader):
                if job.steps == 4:
                    job.checkpointer.wait()  # in every run, the save of this step is committed
                call.ping()
                step = job.steps + 1
                reach(f"forward {step}", call.iteration)
                noise = 0.01 * random.random()
                loss = nn.functional.mse_loss(called(inputs) + noise, targets)
                (loader.weight * loss).backward()
                reach(f"computed {step}", call.iteration)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                say("trained", step=step, iteration=call.iteration, loss=loss.item().hex())
                reach(f"stepped {step}", call.iteration)
                job.step()
                reach(f"done {step}", call.iteration)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # as a scheduler does
            drawn = [random.random(), torch.rand(1).item()]
            say("epoch end", epoch=epoch, drawn=drawn, rate=optimizer.param_groups[0]["lr"])
            reach(f"end {epoch}", call.iteration)
    moments = [v for s in optimizer.state.values() for v in s.values()]
    return content([*model.state_dict().values(), *moments])


if __name__ == "__main__":
    torch.set_num_threads(1)
    received()
    say("ended", state=train())

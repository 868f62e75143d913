"""One rank of a wrapped training with faults that raise no error: `python silent_faults.py PLAN`.

The plan is JSON. `flip` is the rank that flips a bit of a parameter, once, after the optimizer's
step `flip_at`; `slow` the rank whose forward pass takes longer by `slow_s`, or whose data do with
`slow_data`; `base_s` is what the forward pass of every rank takes. `batch_norm` adds that layer;
`logs` makes the ranks average the loss after each step. `high` is the bit to flip; with `loss`,
each step has its loss; with `buffer`, it is a constant buffer that is flipped, and DDP does not
broadcast the buffers; with `own_data`, the ranks have different data; with `gradient`, a bit of a
gradient is flipped instead, "before" or "after" the all-reduce; `finite` are the arguments of
`FiniteCheck`. `replicas` and `stragglers` are the arguments of the checks; `steps` how many to
train at least. With `await`, training goes on until every rank was told of something; with
`raises`, until the first iteration ends with an exception. With `fail_after`, rank 0 raises an
exception once, when all ranks have completed that step. With `shards`, the model is sharded over so
many ranks, and replicated; with `layers`, each layer by itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast import inprocess
from outlast.elastic import FiniteCheck, ReplicaCheck, StragglerCheck

PLAN: dict[str, Any] = {
    "steps": 12,
    "every": 4,
    "flip": -1,
    "flip_at": 0,
    "slow": -1,
    "slow_s": 0.0,
    "slow_data": False,
    "base_s": 0.0,
    "batch_norm": False,
    "logs": False,
    "high": 20,
    "loss": False,
    "buffer": False,
    "own_data": False,
    "gradient": "",
    "min_ranks": None,
    "await": False,
    "raises": False,
    "fail_after": 0,
    "shards": 0,
    "layers": False,
    "job": {},
}
PLAN.update(json.loads(sys.argv[1]))
MOST_STEPS = 3000  # for what does not come
RANK = int(os.environ["RANK"])
MARKS = Path(PLAN["path"] + "-marks")
found: list[str] = []


def say(event: str, **fields: Any) -> None:
    """Prints an event as one line, in one write."""
    os.write(1, json.dumps({"event": event, "of": RANK, **fields}).encode() + b"\n")


def flip_bit(parameter: torch.Tensor) -> None:
    """Flips a bit of the first element, as a fault of the memory does: torch does not see a write.
    Not the lowest bit, since a rounding of the next step may make that one equal again.
    """
    local_part(parameter).view(torch.int32).view(-1).numpy()[0] ^= 1 << PLAN["high"]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def once(name: str) -> bool:
    """Whether this is the first time, over all processes."""
    try:
        (MARKS / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def tell(event: Any) -> None:
    found.append(event.kind)
    fields = {"mismatch": event.ranks} if event.kind == "replica_mismatch" else {}
    say("told", kind=event.kind, **fields)


def checks() -> list[Any]:
    made: list[Any] = []
    if "replicas" in PLAN:
        options = dict(PLAN["replicas"])
        if options.get("on_mismatch") == "call":
            options["on_mismatch"] = tell
        made.append(ReplicaCheck(**options))
    if "finite" in PLAN:
        made.append(FiniteCheck(**PLAN["finite"]))
    if "stragglers" in PLAN:
        made.append(StragglerCheck(**PLAN["stragglers"], on_straggler=tell))
    return made


def all_told() -> bool:
    """Whether all ranks were told of something."""
    told = torch.tensor([float(bool(found))])
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told.item())


class Model(nn.Module):
    """Two layers; the forward pass of the slow rank takes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if PLAN["batch_norm"] else nn.Identity()
        self.second = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(PLAN["base_s"])
        if PLAN["slow"] == RANK and not PLAN["slow_data"]:
            time.sleep(PLAN["slow_s"])
        result: torch.Tensor = self.second(torch.relu(self.norm(self.first(inputs))) * self.scale)
        return result


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    say("entered", iteration=call.iteration, size=dist.get_world_size())
    torch.manual_seed(0)
    model = Model()
    if PLAN["shards"]:
        shape = (dist.get_world_size() // PLAN["shards"], PLAN["shards"])
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        if PLAN["layers"]:
            for layer in (model.first, model.second):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "every": PLAN["every"]}
    if PLAN["min_ranks"]:
        parts["min_ranks"] = PLAN["min_ranks"]
    with outlast.Job(PLAN["path"], **parts, **PLAN["job"], checks=checks()) as job:
        say("restored", step=job.restore(), iteration=call.iteration)
        parallel = (
            model
            if PLAN["shards"]
            else DistributedDataParallel(model, broadcast_buffers=not PLAN["buffer"])
        )
        generator = torch.Generator()
        goes_on = PLAN["raises"] and call.iteration == 0
        while job.steps < PLAN["steps"] or (
            job.steps < MOST_STEPS and (goes_on or (PLAN["await"] and not all_told()))
        ):
            call.ping()
            generator.manual_seed(job.steps + RANK * MOST_STEPS * PLAN["own_data"])
            inputs = torch.randn(8, 4, generator=generator)
            if PLAN["slow"] == RANK and PLAN["slow_data"]:
                time.sleep(PLAN["slow_s"])
            loss = parallel(inputs).square().sum()
            weight = model.first.weight
            wrong = PLAN["gradient"] if job.steps + 1 == PLAN["flip_at"] else ""
            wrong = wrong if PLAN["flip"] == RANK else ""
            # The hook of a tensor is called before that of DDP, which reduces the gradient.
            hook = weight.register_hook(flip_bit) if wrong == "before" else None
            loss.backward()
            if hook is not None:
                hook.remove()
            if wrong == "after":
                flip_bit(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            is_due = job.steps + 1 == PLAN["flip_at"] and PLAN["flip"] == RANK
            if is_due and not PLAN["gradient"] and once("flipped"):
                flip_bit(model.scale if PLAN["buffer"] else model.first.weight)
                say("flipped", step=job.steps + 1)
            job.step(samples=8, loss=loss if PLAN["loss"] else None)
            if PLAN["logs"]:
                dist.all_reduce(loss.detach())
            if job.steps == PLAN["fail_after"]:
                dist.barrier()
                if RANK == 0 and once("failed"):
                    raise RuntimeError("a planned fault")
        say("left", step=job.steps)
    content = hashlib.sha256()
    for tensor in model.state_dict().values():
        content.update(local_part(tensor).numpy().tobytes())
    return content.hexdigest()


if __name__ == "__main__":
    logging.basicConfig(format="%(name)s %(message)s")
    torch.set_num_threads(1)
    MARKS.mkdir(parents=True, exist_ok=True)
    say("ended", weights=train())

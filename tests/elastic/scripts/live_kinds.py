"""One rank of a wrapped training of several kinds: `python live_kinds.py PLAN`.

The plan is JSON; its faults are those of `planned_faults`. The points of step N: `forward N M`, in
front of its micro-batch M; `computed N`; `stepped N` (between the optimizer's step and `job.step`);
`done N`. `kind` is one of:

`accumulation`: each step has two micro-batches. `scaler`: a `GradScaler`, which skips step 5.
`consistent`: `ConsistentDDP`. `stream`: the data come from a `ShardedStream`. `loader`: from a
loader with a state of each rank. `told`: that has the losses of its rank, which the program adds
after the point `backward N`, behind the backward pass. `compiled`: the model is compiled.
`closure`: LBFGS, with a point `evaluation N M` in front of each call of its closure.
`shrink`: a killed rank is not replaced; with `shrinks`, so with any other kind. All have a learning
rate scheduler.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import outlast
from outlast import inprocess
from outlast.elastic import ConsistentDDP, ElasticLoader, ShardedStream
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

PLAN: dict[str, Any] = {"steps": 12, "kind": "accumulation", "job": {}, "faults": []}
PLAN["shrinks"] = False
PLAN.update(json.loads(sys.argv[1]))
KIND = PLAN["kind"]
LENGTHS = [17, 9, 30, 8, 21, 14]  # of the shards of a stream
INPUTS = torch.randn(99, 4, generator=torch.Generator().manual_seed(1))
reach = PlannedFaults(PLAN, {}).reach


def read(shard: str, offset: int) -> Iterator[torch.Tensor]:
    """The items of a shard."""
    begin = sum(LENGTHS[: int(shard)])
    return iter(INPUTS[begin + offset : begin + LENGTHS[int(shard)]])


class Drawing:
    """A loader that draws its samples: each rank has other ones, and a state of its own."""

    weight = 1.0

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset
        self._drawn = torch.Generator().manual_seed(dist.get_rank())
        self.losses = 0.0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            yield self._dataset[torch.randperm(len(self._dataset), generator=self._drawn)[:8]]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn.get_state(), "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn.set_state(state["drawn"])
        self.losses = state["losses"]


def data() -> Any:
    if KIND == "stream":
        return ShardedStream([str(i) for i in range(len(LENGTHS))], read, batch_size=4)
    dataset = TensorDataset(INPUTS[:96], INPUTS[:96].sum(dim=1, keepdim=True))
    if KIND in ("loader", "told"):
        return Drawing(dataset)
    more: dict[str, Any] = {}
    if KIND == "accumulation":
        more["max_batch_size"] = 8 // dist.get_world_size()
    elif KIND == "consistent":
        more["virtual_replicas"] = 4
    return ElasticLoader(dataset, global_batch_size=16, seed=3, **more)


def parallel(model: nn.Module) -> Any:
    if KIND == "consistent":
        return ConsistentDDP(model, virtual_replicas=4)
    if KIND == "compiled":
        return DistributedDataParallel(torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type]
    return DistributedDataParallel(model)


def evaluate(
    model: Any, inputs: Any, targets: Any, calls: Iterator[int], step: int, iteration: int
) -> torch.Tensor:
    """The closure of a step: forward and backward."""
    reach(f"evaluation {step} {next(calls)}", iteration)
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs) + 0.01 * random.random(), targets)
    loss.backward()
    return loss


def batches(loader: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of one epoch after the other."""
    while True:
        for batch in loader:
            if KIND == "stream":
                yield batch, batch.sum(dim=1, keepdim=True)
            else:
                yield batch[0], batch[1]


SHRINKS = KIND == "shrink" or PLAN["shrinks"]
ranks = ShiftRanks() if SHRINKS else Compose(ShiftRanks(), AwaitReplacements(60))


@inprocess.Wrapper(rank_assignment=ranks)
def train(call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    random.seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
    called = parallel(model) if KIND == "consistent" else None
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if KIND == "closure":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.05, total_steps=20, cycle_momentum=KIND != "closure"
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    states = {"scheduler": scheduler, "scaler": scaler}
    loader = data()
    if SHRINKS:
        PLAN["job"].update(min_ranks=2, linger=0)
    job = outlast.Job(
        PLAN["path"],
        model=called or model,
        optimizer=optimizer,
        loader=loader,
        states=states,
        every=4,
        **PLAN["job"],
    )
    with job:
        step = job.restore()
        size = dist.get_world_size()
        say("restored", step=step, source=job.restored_from, iteration=call.iteration, size=size)
        called = called or parallel(model)
        micro = 0
        for inputs, targets in batches(loader):
            call.ping()
            step = job.steps + 1
            last = loader.boundary if isinstance(loader, ElasticLoader) else True
            reach(f"forward {step} {micro}", call.iteration)
            part: Any = contextlib.nullcontext()
            if KIND == "consistent":
                part = called.part(loader)
            elif KIND == "accumulation" and not last:
                part = called.no_sync()
            if KIND == "closure":
                calls = itertools.count(1)
                given = called, inputs, targets, calls, step, call.iteration
                loss: Any = optimizer.step(partial(evaluate, *given))
            with part:
                if KIND != "closure":
                    # A generator that `ConsistentDDP` has for each part.
                    draw = torch.rand(1).item() if KIND == "consistent" else random.random()
                    loss = nn.functional.mse_loss(called(inputs) + 0.01 * draw, targets)
                    loss = loss if KIND == "consistent" else loss * loader.weight
                if KIND == "scaler":
                    scaler.scale(loss * (float("inf") if step == 5 else 1.0)).backward()
                elif KIND != "closure":
                    loss.backward()
            if KIND == "told":
                reach(f"backward {step}", call.iteration)
                loader.losses += loss.item()
            micro += 1
            if not last:
                continue
            micro = 0
            reach(f"computed {step}", call.iteration)
            if KIND == "scaler":
                scaler.step(optimizer)
                scaler.update()
            elif KIND != "closure":
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            items = inputs[:, 0].tolist()
            loss_text = loss.item().hex()
            say("trained", step=step, iteration=call.iteration, loss=loss_text, items=items)
            reach(f"stepped {step}", call.iteration)
            job.step()
            reach(f"done {step}", call.iteration)
            if job.steps == 4:
                job.checkpointer.wait()
            if job.steps == PLAN["steps"]:
                break
    moments = [
        v.tolist() if isinstance(v, torch.Tensor) else str(v)
        for s in optimizer.state.values()
        for _, v in sorted(s.items())
    ]
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return repr(
        [
            weights,
            moments,
            scaler.state_dict(),
            scheduler.last_epoch,
            optimizer.param_groups[0]["lr"],
            getattr(loader, "losses", 0.0),
        ]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    say("ended", state=train())

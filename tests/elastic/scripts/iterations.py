"""One rank of a training with work behind `job.step()`: `python iterations.py PLAN`.

The plan is JSON; its `faults` are those of `planned_faults`. Each step has two batches. The points
of step N: `forward N`, `done N` (behind `job.step`), `evaluating N` (numbers were drawn), `rest N`
(the end of the loop's body). `kind` is `ddp` or `fsdp`; `where` the evaluation stands: in the
`body`, behind `job.step()`, in `functions` of `job.after_steps`, or there, in a `plain` loop.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast
from outlast import inprocess
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

PLAN: dict[str, Any] = {"kind": "ddp", "where": "body", "faults": []}
PLAN.update(json.loads(sys.argv[1]))
STEPS, EVERY = 12, 4
reach = PlannedFaults(PLAN, {}).reach


class Best:
    value = float("inf")

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


@inprocess.Wrapper(rank_assignment=Compose(ShiftRanks(), AwaitReplacements(60)))
def train(call: inprocess.CallWrapper) -> str:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    called = fully_shard(model) if PLAN["kind"] == "fsdp" else DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=3))
    best = Best()
    random.seed(dist.get_rank())

    def evaluate() -> None:
        """Draws numbers, and keeps the best value of all ranks."""
        noise = random.random() + torch.rand(1).item()
        reach(f"evaluating {job.steps}", call.iteration)
        sums = [whole(each).double().sum().item() for each in model.parameters()]
        value = torch.tensor(sum(sums) + noise)
        dist.all_reduce(value)
        best.value = min(best.value, value.item())
        found = f"{value.item().hex()} {best.value.hex()}"
        say("evaluated", step=job.steps, loss=found, iteration=call.iteration)

    def keep_best() -> None:
        job.save(metric=best.value)
        reach(f"keeping {job.steps}", call.iteration)

    def end_of_body() -> None:
        if PLAN["where"] == "body":
            scheduler.step()
            if job.steps % 2 == 0:
                evaluate()
        reach(f"rest {job.steps}", call.iteration)

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = nn.functional.mse_loss(called(inputs) + 0.01 * random.random(), targets)
        (loss / 2).backward()
        return loss.item()

    def take_step(loss: float) -> None:
        optimizer.step()
        optimizer.zero_grad()
        said = f"{loss.hex()} {optimizer.param_groups[0]['lr'].hex()}"
        say("trained", step=job.steps + 1, loss=said, iteration=call.iteration)

    parts: dict[str, Any] = {"model": called, "optimizer": optimizer}
    states = {"best": best, "scheduler": scheduler}
    job = outlast.Job(PLAN["path"], **parts, states=states, every=EVERY, keep=9)
    with job:
        if PLAN["where"] != "body":
            job.after_steps(1, scheduler.step)
            job.after_steps(2, evaluate)
            job.after_steps(6, keep_best)
        say("restored", step=job.restore(), source=job.restored_from, iteration=call.iteration)
        if PLAN["where"] == "plain":
            for step in range(job.steps + 1, STEPS + 1):
                reach(f"forward {step}", call.iteration)
                take_step(backward(x[step :: dist.get_rank() + 5], x[step :: dist.get_rank() + 5]))
                job.step()
                reach(f"done {step}", call.iteration)
        for _ in job.epochs(0 if PLAN["where"] == "plain" else 2):
            for number, batch in enumerate(job.batches(loader)):
                if job.steps == EVERY:
                    job.checkpointer.wait()  # in every run, the save of this step is committed
                reach(f"forward {job.steps + 1}", call.iteration)
                loss = backward(*batch)
                if number % 2 == 0:
                    continue
                take_step(loss)
                job.step()
                reach(f"done {job.steps}", call.iteration)
                end_of_body()
    content = b"".join(whole(each).numpy().tobytes() for each in model.parameters())
    return f"{hashlib.sha256(content).hexdigest()} {best.value.hex()} {random.random()}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    say("ended", state=train())

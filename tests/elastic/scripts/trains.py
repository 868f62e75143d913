"""One rank of a training run, configured by a JSON plan: `python trains.py PLAN`.

It prints the samples of each step, and the exact loss.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from outlast.elastic import ConsistentDDP, ElasticLoader, Job
from outlast.errors import OutlastError

PLAN: dict[str, Any] = {
    "samples": 90,
    "batch": 16,
    "epochs": 2,
    "every": 4,
    "virtual": None,
    "max_batch": None,
    "drop_last": False,
    "dropout": 0.2,
    "workers": 0,
    "linger": 0,
    "sharded": False,
    "states": {},
    "faults": [],
    **json.loads(sys.argv[1]),
}
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


def say(event: str, **fields: Any) -> None:
    """Prints an event as one line, in one write."""
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


class Data(Dataset[Any]):
    """Random samples, with their indices."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, 8, generator=generator)
        self.y = torch.randint(0, 3, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


class Named:
    """A state with one value; the one named `bad` may refuse to load."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value
        self.tensor = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.name == "bad" and RANK in PLAN["bad_on"] and state["value"] != self.value:
            raise RuntimeError("it does not fit")
        self.value = state["value"]


def digest(*tensors: torch.Tensor) -> str:
    """A hash of the exact values."""
    content = hashlib.sha256()
    for tensor in tensors:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        content.update(full.detach().contiguous().numpy().tobytes())
    return content.hexdigest()[:16]


def moments_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The moments, in the order of the parameters; empty before the first step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in parameters if p in optimizer.state]
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def make_module() -> nn.Module:
    torch.manual_seed(0)
    if PLAN["virtual"]:
        middle: nn.Module = nn.BatchNorm1d(16) if PLAN["drop_last"] else nn.LayerNorm(16)
    else:
        middle = nn.LayerNorm(16)
    return nn.Sequential(nn.Linear(8, 16), middle, nn.Dropout(PLAN["dropout"]), nn.Linear(16, 3))


def wrap(module: nn.Module) -> nn.Module:
    if PLAN["virtual"]:
        return ConsistentDDP(module, PLAN["virtual"])
    if PLAN["sharded"]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
        return module
    if WORLD_SIZE == 1:
        return module
    return DistributedDataParallel(module)


def fire_faults(job: Job, when: str) -> None:
    """Fires the faults planned for this rank, `before` or `after` a call of `job.step`."""
    if PLAN["faults"]:
        time.sleep(0.02)  # a request must arrive before training ends
    for fault in list(PLAN["faults"]):
        if (fault["rank"], fault["when"]) != (RANK, when) or job.steps < fault["step"]:
            continue
        PLAN["faults"].remove(fault)
        what = fault["what"]
        if what == "stop":
            thread = threading.Thread(target=job.stop, args=("the machine goes",))
            thread.start()
            thread.join()
        elif what == "save":
            job.save()
        elif what == "twice":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.Signals[what])


def every() -> Any:
    value = PLAN["every"]
    return datetime.timedelta(seconds=value) if isinstance(value, float) else value


def train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loader = job.loader
    indices: list[int] = []
    losses: list[list[Any]] = []
    while loader.epoch < PLAN["epochs"]:
        for x, y, numbers in loader:
            if PLAN["virtual"]:
                with model.part(loader):
                    loss = nn.functional.cross_entropy(model(x), y)
                    loss.backward()
            else:
                loss = nn.functional.cross_entropy(model(x), y)
                (loader.weight * loss).backward()
            if loader.weight > 0:
                indices += numbers.tolist()
                losses.append([loader.part, loader.weight, loss.item().hex()])
            if loader.boundary:
                optimizer.step()
                if not PLAN["virtual"]:
                    optimizer.zero_grad()
                say("trained", step=job.steps + 1, indices=indices, losses=losses)
                indices, losses = [], []
                fire_faults(job, "before")
                job.step()
                fire_faults(job, "after")


def main() -> None:
    dist.init_process_group("gloo")
    module = make_module()
    model = wrap(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    loader = ElasticLoader(
        Data(PLAN["samples"]),
        global_batch_size=PLAN["batch"],
        max_batch_size=PLAN["max_batch"],
        virtual_replicas=PLAN["virtual"],
        drop_last=PLAN["drop_last"],
        seed=PLAN.get("seed", 5),
        num_workers=PLAN["workers"],
    )
    states = {name: Named(name, value) for name, value in PLAN["states"].items()}
    before = digest(*module.state_dict().values())
    with Job(
        PLAN["path"],
        model=model,
        optimizer=optimizer,
        loader=loader,
        states=states,
        every=every(),
        linger=datetime.timedelta(seconds=PLAN["linger"]),
    ) as job:
        try:
            step = job.restore()
        except (OutlastError, ValueError) as e:
            same = before == digest(*module.state_dict().values())
            values = {name: [s.value, s.tensor.tolist()] for name, s in states.items()}
            place = [loader.epoch, loader.sampler.position]
            say("refused", type=type(e).__name__, message=str(e), same=same, states=values)
            say("after", steps=job.steps, place=place, optimizer=len(optimizer.state))
            return
        moments = moments_of(optimizer)
        say(
            "restored",
            step=step,
            samples=job.samples,
            weights=digest(*module.state_dict().values()),
            moments=digest(*moments),
            states={name: state.value for name, state in states.items()},
        )
        if PLAN["virtual"]:
            model.train()
        train(job, model, optimizer)
        job.checkpointer.wait()
        committed = [info.step for info in job.checkpointer.checkpoints()]
    if PLAN["virtual"]:
        model.average_statistics()
    moments = moments_of(optimizer)
    say(
        "ended",
        steps=job.steps,
        samples=job.samples,
        weights=digest(*module.state_dict().values()),
        moments=digest(*moments),
        committed=committed,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    dist.barrier()
    dist.destroy_process_group()

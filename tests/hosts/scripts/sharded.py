"""A training on several hosts of which each rank has a part that no other one has: shards of FSDP2,
generators, a sampler's place, a state of its own. It prints a hash of all that all ranks have.

A test may set, in the environment: `LEAVE_AT`, `SUCCEED_AFTER`, `IMPORT_FOREVER`,
`DIE_IN_HANDOVER`, `HSDP`, `STRAGGLER` (a host whose forward pass is slow), and `MOMENT`, the name
of one, and a file: that moment begins when it makes the file, and lasts until there is one with the
suffix `.over`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "examples" / "hosts"))

import torch
import torch.distributed as dist
import train as example
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast
from outlast import inprocess
from outlast.elastic import StragglerCheck
from outlast.elastic.job.live import handover


def moment(name: str) -> None:
    """A moment of the training that lasts, once, as long as the test needs."""
    wanted, _, path = os.environ.get("MOMENT", "").partition(":")
    mark = Path(path)
    if wanted != name or mark.exists():
        return
    mark.touch()
    while not mark.with_suffix(".over").exists():
        time.sleep(0.02)


class Noise:
    """A state that differs between the ranks."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self) -> None:
        self.value += float(torch.rand(()))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.value and dist.get_rank() == 1:
            moment("restore")


@inprocess.Wrapper()
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> None:
    assert call is not None
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = TensorDataset(torch.arange(720, dtype=torch.float32).reshape(240, 3) / 720)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, seed=5))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    average = nn.Linear(3, 1)
    size = dist.get_world_size()
    names = ("replicate", "shard")
    hsdp = "HSDP" in os.environ
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=names) if hsdp else None
    fully_shard(net, mesh=mesh)
    slow = os.environ.get("STRAGGLER")
    if slow == socket.gethostname():
        net[0].register_forward_pre_hook(lambda *_: time.sleep(0.3))
    torch.manual_seed(rank)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    noise = Noise()
    with outlast.Job(
        options.state,
        model={"net": net, "average": average},
        optimizer=optimizer,
        states={"noise": outlast.per_rank(noise)},
        every=25,
        checks=StragglerCheck(window=4, windows=2, on_straggler="move") if slow else (),
    ) as job:
        job.after_steps(12, lambda: moment("evaluation") if rank == 0 else None)
        first = job.restore()
        if rank == 0:
            print(f"iteration {call.iteration}: from step {first}", flush=True)
        for _ in job.epochs(3):
            for (features,) in job.batches(loader):
                call.ping()
                optimizer.zero_grad()
                loss = (net(features) - features.sum(1, keepdim=True) - noise.value).pow(2).mean()
                loss.backward()
                optimizer.step()
                noise.add()
                with torch.no_grad():
                    average.weight.add_(0.01)
                job.step()
                if f"{socket.gethostname()}:{job.steps}" == os.environ.get("LEAVE_AT"):
                    job.leave("the program said so")
                example.record(options, call, job.steps)
                time.sleep(0 if options.go.exists() else options.pause)
                while rank == 0 and job.steps == options.hold_at and not options.go.exists():
                    call.ping()
                    time.sleep(0.02)
    shards = [each.to_local().flatten() for each in net.parameters()]
    own = [*shards, average.weight.flatten(), torch.tensor([noise.value])]
    content = torch.cat(own).detach().numpy().tobytes() + torch.get_rng_state().numpy().tobytes()
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, content)
    if rank == 0:
        print(f"weights {hashlib.sha256(b''.join(everything)).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if "OUTLAST_SUCCEEDS" in os.environ:
        time.sleep(float(os.environ.get("SUCCEED_AFTER", "0")))
    while (mark := os.environ.get("IMPORT_WHILE")) and Path(mark).exists():
        time.sleep(0.02)
    if "OUTLAST_SUCCEEDS" in os.environ and (error := os.environ.get("FAIL_IMPORT")):
        raise ImportError(error)
    if mark := os.environ.get("IMPORT_FOREVER"):
        Path(mark).touch()
        time.sleep(10000)
    elif os.environ.get("OUTLAST_REPLACEMENT", "0") != "0":
        moment("held")
    if "DIE_IN_HANDOVER" in os.environ:
        handover.Handover._send = _die  # type: ignore[method-assign]
    example.train = train
    example.main()

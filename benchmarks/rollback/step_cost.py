"""What keeping live state costs per step: the same steps with `Job(live=True)` and without; or,
with it, with and without a mirror of each rank's own state on another host.

Segments alternate in the same two processes, in the order A B B A; each pair gives one ratio. Each
segment has a new `Job` in an empty folder, whose first save is over before the time is taken.

On a machine with other work, times are noise. So the processor time of the training thread within
`job.step()` is measured too: without what the hooks in the backward pass and the optimizer do.

The limit: a write after `job.step()` is found by what torch counts for each tensor, which Python
can only ask one by one, and a step may have drawn random numbers. So one pass over these counters,
and one over them and the three generators, by their own functions, are timed in the same training:
the caches are as a step has left them.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from benchmarks.lib.rank_processes import FOLDER, RankProcesses, wrapped
from outlast import inprocess

__all__ = ["MODELS", "step_cost"]

RANKS = 2
MODELS = {
    "10 tensors": (64, 256, 3, 64),
    "1,000 tensors": (16, 16, 498, 64),
    "10,000 tensors": (16, 16, 4998, 64),
}
"""Inputs, width, inner layers and batch."""
SEGMENT_S = 0.6
_WARM_STEPS = 5
_LEAST_PAIRS = 2

_Cost: TypeAlias = tuple[float, float, float]
"""Of one step: its time, and its processor time of both ranks together; and that of the training
thread of this rank within `job.step()`, the median.
"""


def step_cost(name: str, seconds: float, *, mirrors: bool = False) -> dict[str, Any]:
    """The costs of a step in each segment, without and with live state, or `mirrors`."""
    with RankProcesses(f"rollback-cost-{name}", RANKS) as processes:
        folder = processes.folder
        processes.start_all(lambda slot: _rank(slot, name, seconds, folder, mirrors))
        processes.wait_all(300 + 4 * seconds)
        found: dict[str, Any] = json.loads((folder / "costs.json").read_text())
    return found


def _rank(slot: int, name: str, seconds: float, folder: Path, mirrors: bool) -> None:
    def body(call: inprocess.CallWrapper) -> None:
        dist.init_process_group("gloo")
        os.environ["OUTLAST_HOST"] = f"host-{slot}" if mirrors else ""
        os.environ["OUTLAST_HOST_ADDR"] = "127.0.0.1"
        training = _Training(*MODELS[name])
        count = _agreed(max(_WARM_STEPS, SEGMENT_S / training.steps(20)[0]))
        plain: list[_Cost] = []
        live: list[_Cost] = []
        with tempfile.TemporaryDirectory(dir=FOLDER.absolute(), prefix="cost-") as mine:
            shared = [mine]
            dist.broadcast_object_list(shared, 0)
            end = time.monotonic() + seconds
            while _agreed(len(plain) < _LEAST_PAIRS or time.monotonic() < end):
                order = (False, True) if len(plain) % 2 == 0 else (True, False)
                for kept in order:
                    path = Path(shared[0]) / "checkpoints"
                    # Two processes of this host stand for two hosts.
                    os.environ["OUTLAST_FAILURE_DOMAIN"] = f"{slot}" if mirrors and kept else ""
                    cost = training.segment(path, kept or mirrors, int(count))
                    (live if kept else plain).append(cost)
            dist.barrier()
        counters = training.after_steps(training.look_at_counters)
        looks = training.after_steps(training.look)
        if slot == 0:
            size = sum(p.nbytes for p in training.model.parameters())
            costs = {"plain": plain, "live": live, "size_bytes": 3 * size, "steps": int(count)}
            costs |= {"counters": counters, "looks": looks}
            (folder / "costs.json").write_text(json.dumps(costs))
        dist.barrier()
        dist.destroy_process_group()

    body.__annotations__ = {"call": inprocess.CallWrapper}
    wrapped(body, inprocess.Wrapper())()


class _Training:
    def __init__(self, inputs: int, width: int, inner: int, batch: int) -> None:
        torch.manual_seed(0)
        torch.set_flush_denormal(True)  # what is left of a value after thousands of layers
        layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
        for _ in range(inner):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(width, 10))
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.inputs = torch.randn(batch, inputs)
        self._parameters = list(self.model.parameters())

    def segment(self, path: Path, live: bool, count: int) -> _Cost:
        """The cost of a step with a new job."""
        job = outlast.Job(path, model=self.model, optimizer=self.optimizer, every=None, live=live)
        job.restore()
        self.steps(_WARM_STEPS, job)
        cost = self.steps(count, job)
        job.close()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        dist.barrier()
        return cost

    def look_at_counters(self) -> None:
        """How often each parameter and moment was written to."""
        moments = (each for state in self.optimizer.state.values() for each in state.values())
        list(map(operator.attrgetter("_version"), itertools.chain(self._parameters, moments)))

    def look(self) -> None:
        """The same, and the state of each generator of random numbers."""
        self.look_at_counters()
        torch.get_rng_state(), random.getstate(), numpy.random.get_state()

    def after_steps(self, look: Callable[[], None]) -> float:
        """The processor time of a look right after a step."""
        taken = []
        for _ in range(4 * _WARM_STEPS):
            self._train()
            start = time.thread_time()
            look()
            taken.append(time.thread_time() - start)
        return statistics.median(taken)

    def _train(self) -> None:
        self.ddp(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int, job: outlast.Job | None = None) -> _Cost:
        """Trains; returns the cost of a step, of the slower rank."""
        dist.barrier()
        within = [0.0]
        start, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            self._train()
            if job is not None:
                before = time.thread_time()
                job.step()
                within.append(time.thread_time() - before)
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        processor = torch.tensor([time.process_time() - used], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        dist.all_reduce(processor)
        return taken.item() / count, processor.item() / count, statistics.median(within)


def _agreed(value: float) -> float:
    """The value of rank 0."""
    tensor = torch.tensor([float(value)])
    dist.broadcast(tensor, 0)
    return tensor.item()

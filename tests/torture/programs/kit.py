"""What the generated programs import: their data, the faults that they inject, what they record.

PROGRAM_OUT is the folder of a run. Each process appends what it has computed to a file of its own
there: a value that is computed twice, before and after a fault, is recorded twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset, Sampler

OUT = Path(os.environ["PROGRAM_OUT"])
CHECKPOINTS = os.environ["PROGRAM_CHECKPOINTS"]
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("PROGRAM_FAULTS", "[]"))

SAMPLES, BATCH, EPOCHS, STEPS = 64, 4, 2, 16
"""The number of samples of an epoch, over all ranks; of a batch of a rank; and the steps of the
programs that count no epochs.
"""


class Fault(RuntimeError):
    """An injected fault."""


def record(kind: str, key: object, value: object) -> None:
    """Records a value in one write: a process may be killed right after it."""
    line = json.dumps([kind, str(key), RANK, value]) + "\n"
    with open(OUT / "records" / f"{RANK}-{os.getpid()}.jsonl", "a") as file:
        file.write(line)


def bits(value: Any) -> str:
    """All bits of a state, as a short text."""

    def plain(each: Any) -> Any:
        if isinstance(each, DTensor):
            each = each.to_local()
        if isinstance(each, torch.Tensor):
            return each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(each, dict):
            return sorted((str(k), plain(v)) for k, v in each.items())
        if isinstance(each, (list, tuple)):
            return [plain(v) for v in each]
        return each.hex() if isinstance(each, float) else each

    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()[:16]


def probe(phase: str, step: int) -> None:
    """A place where a planned fault may come."""
    for number, fault in enumerate(FAULTS):
        if fault["phase"] != phase or fault["rank"] != RANK or step < fault["step"]:
            continue
        try:
            (OUT / "fired" / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        print(f"fault {number}: {fault} at step {step}", flush=True)
        _inject(fault["kind"], f"fault {'abcdefgh'[number]}")  # with numbers, they were equal


def _inject(kind: str, name: str) -> None:
    if kind == "exception":
        raise Fault(name)
    if kind == "exit":
        sys.exit(1)
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
    os.kill(os.getpid(), numbers[kind])


# ------------------------------------------------------------------------------------------- data


class Data(Dataset[Any]):
    """Samples with their indices. What a worker draws for a sample must be drawn again."""

    def __init__(self, length: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index] + 0.01 * torch.randn(8) + random.random() / 100
        return x, x.sum().reshape(1), index


class Stream(IterableDataset[Any]):
    """The same samples in order, each worker of each rank with a share of its own."""

    def __init__(self) -> None:
        self.data = Data()

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(RANK * count + number, SAMPLES, WORLD_SIZE * count):
            x = self.data.x[index]
            yield x, x.sum().reshape(1), index


class OwnSampler(Sampler[int]):
    """A sampler that somebody wrote: it shuffles by seed and epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        """As that of torch's `DistributedSampler`."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(100 * RANK + self.epoch)
        yield from (torch.randperm(self.length, generator=generator) + RANK).tolist()

    def __len__(self) -> int:
        return self.length


# ------------------------------------------------------------------------------- models and states


def model(layers: str) -> nn.Sequential:
    """A small model; the ranks begin with the same one, and with the same random numbers."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    middle = {"plain": nn.ReLU(), "dropout": nn.Dropout(0.2), "batch_norm": nn.BatchNorm1d(16)}
    return nn.Sequential(nn.Linear(8, 16), middle[layers], nn.Linear(16, 1))


class Value:
    """Plain values as a state."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        """The values, by name."""
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the values."""
        self.__dict__.update(state)


class Ema:
    """An average of the weights, as many people write it."""

    def __init__(self, of: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in of.named_parameters()}

    @torch.no_grad()
    def update(self, of: nn.Module) -> None:
        """Takes in the present weights."""
        for name, p in of.named_parameters():
            self.shadow[name].mul_(0.9).add_(p, alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        """The averages, by name."""
        return dict(self.shadow)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the averages."""
        self.shadow = {name: value.clone() for name, value in state.items()}


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a value over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def write_best(value: float, of: nn.Module) -> None:
    """Rank 0 writes the best model to a file, under a new name first."""
    if dist.get_rank() == 0:
        torch.save({"value": value, "model": of.state_dict()}, OUT / "best.tmp")
        os.replace(OUT / "best.tmp", OUT / "best.pt")


def generators() -> dict[str, Any]:
    """The states of the generators of this process."""
    state = np.random.get_state()
    own = {"torch": torch.get_rng_state(), "python": random.getstate()[1]}
    return own | {"numpy": [state[1].tobytes(), state[2]]}


def done(**values: Any) -> None:
    """What the training has ended with."""
    record("end", "", {name: bits(value) for name, value in values.items()})


# ------------------------------------------------------------------- what else a program may have


@contextlib.contextmanager
def background(is_daemon: bool) -> Iterator[None]:
    """A thread that is busy beside the training, as one that watches the GPU."""
    ends = threading.Event()

    def run() -> None:
        while not ends.wait(0.01):
            sum(range(100))

    thread = threading.Thread(target=run, daemon=is_daemon)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@contextlib.contextmanager
def handlers(kind: str) -> Iterator[None]:
    """Signal handlers of the program's own."""
    ticks: list[int] = []
    if kind == "timer":
        signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    if kind == "children":
        signal.signal(signal.SIGUSR2, lambda *_: ticks.append(2))
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2))
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)  # Python's end takes the handlers away first

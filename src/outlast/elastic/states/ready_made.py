"""Ready-made states for the parts of a training job.

    ModuleState(model), OptimizerState(optimizer), SchedulerState(scheduler), CounterState()

`StateDictState` is for any object with `state_dict` and `load_state_dict`. A load reads and checks
all of the saved state before it changes anything; if it fails later, the old state is restored.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from torch import nn

from outlast.async_checkpoint.inspection import checksum
from outlast.elastic.random_generators import Generators, capture, setter
from outlast.elastic.states import replicas
from outlast.elastic.states.content import check_module, dump, parse
from outlast.elastic.states.state import PreparedState
from outlast.elastic.wrapped_modules import unwrapped

__all__ = [
    "CounterState",
    "EMAState",
    "ModuleState",
    "OptimizerState",
    "RandomState",
    "ScalerState",
    "SchedulerState",
    "StateDictState",
]

_RANDOM = "random"


class StateDictState(PreparedState):
    """The state of any object with `state_dict` and `load_state_dict`.

    Args:
        source: the object, which this state keeps alive.
        name: of the state.

    Raises:
        ValueError: if the object lacks one of the two methods; or see `State`.
    """

    kind = "state_dict"

    def __init__(self, source: Any, name: str) -> None:
        lacks = [m for m in ("state_dict", "load_state_dict") if not hasattr(source, m)]
        if lacks:
            raise ValueError(f"{name!r}: {type(source).__name__} has no {' and no '.join(lacks)}")
        super().__init__(name)
        self.source = source

    def save(self, fileobj: BinaryIO) -> None:
        dump(self.kind, self.source.state_dict(), fileobj)

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        saved = parse(self.kind, fileobj)
        if not isinstance(self.source, nn.Module):
            return lambda: self._replace(saved)
        check_module(self.source.state_dict(), saved)
        return lambda: self.source.load_state_dict(saved)

    def _replace(self, saved: Any) -> None:
        before = copy.deepcopy(self.source.state_dict())
        try:
            self.source.load_state_dict(saved)
        except BaseException:
            self.source.load_state_dict(before)
            raise


class ModuleState(StateDictState):
    """A module: rank 0's parameters and buffers, which are the same whether or not the module is
    wrapped in DDP or compiled.

    Args:
        module: unsharded on every replica; for sharded parameters use `ShardedState`.
        name: of the state.
    """

    kind = "module"

    def __init__(self, module: nn.Module, name: str = "model") -> None:
        super().__init__(unwrapped(module), name)


class OptimizerState(StateDictState):
    """An optimizer. State that is spread over the replicas (`ZeroRedundancyOptimizer`) is gathered.

    Args:
        optimizer: unsharded on every replica; for sharded parameters use `ShardedState`.
        name: of the state.
    """

    kind = "optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer, name: str = "optimizer") -> None:
        super().__init__(optimizer, name)

    def sync(self) -> None:
        gather = getattr(self.source, "consolidate_state_dict", None)
        if gather is not None:
            gather(to=0)

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        saved = parse(self.kind, fileobj)
        groups = (self.source.param_groups, saved["param_groups"])
        own, there = ([len(group["params"]) for group in each] for each in groups)
        if own != there:
            raise ValueError(f"it has groups of {own} parameters, groups of {there} were saved")
        return lambda: self.source.load_state_dict(saved)


class SchedulerState(StateDictState):
    """A learning-rate scheduler.

    Args:
        scheduler: of `torch.optim.lr_scheduler`, or like it.
        name: of the state.
    """

    kind = "scheduler"

    def __init__(self, scheduler: Any, name: str = "scheduler") -> None:
        super().__init__(scheduler, name)


class ScalerState(StateDictState):
    """A gradient scaler.

    Args:
        scaler: `torch.amp.GradScaler`, or like it.
        name: of the state.
    """

    kind = "scaler"

    def __init__(self, scaler: Any, name: str = "scaler") -> None:
        super().__init__(scaler, name)


class EMAState(StateDictState):
    """A moving average of the weights.

    Args:
        ema: `torch.optim.swa_utils.AveragedModel`, or another module or object like it.
        name: of the state.
    """

    kind = "ema"

    def __init__(self, ema: Any, name: str = "ema") -> None:
        super().__init__(unwrapped(ema) if isinstance(ema, nn.Module) else ema, name)


class CounterState(PreparedState):
    """Counters of training progress.

    Args:
        name: of the state.

    Attributes:
        step: number of optimizer steps.
        epoch: number of completed epochs.
        samples: number of samples trained on, over all replicas.
    """

    def __init__(self, name: str = "counters") -> None:
        super().__init__(name)
        self.step = 0
        self.epoch = 0
        self.samples = 0
        self._before = 0.0
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Training time: earlier runs up to their last save, plus this run."""
        return self._before + time.monotonic() - self._since

    def save(self, fileobj: BinaryIO) -> None:
        numbers = {"step": self.step, "epoch": self.epoch, "samples": self.samples}
        fileobj.write(json.dumps({**numbers, "seconds": self.seconds}).encode())

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        saved = json.loads(fileobj.read())
        step, epoch, samples = (int(saved[name]) for name in ("step", "epoch", "samples"))
        seconds = float(saved["seconds"])

        def apply() -> None:
            self.step, self.epoch, self.samples = step, epoch, samples
            self._before, self._since = seconds, time.monotonic()

        return apply


class RandomState(PreparedState):
    """The global generators of every replica: those of Python, NumPy (if it is imported), and torch
    on the CPU and on the GPUs that the process uses. For others, use `StateDictState`.

    A load restores them by rank, so the same number of replicas always draws the same numbers. In a
    job of another size:

    * a generator that had the same state on all of several replicas gets that state on all
      replicas, so that they keep drawing the same numbers;
    * otherwise, replicas whose rank existed before continue with their own generators;
    * new replicas are seeded with a hash of all saved generators and their rank.

    Args:
        name: of the state.
    """

    def __init__(self, name: str = "random") -> None:
        super().__init__(name)
        self._gathered: list[str] | None = None

    def sync(self) -> None:
        def keep(parts: list[str]) -> None:
            self._gathered = parts

        job = replicas.current().within()
        job.gather("the gathering of random generators", _packed(capture()), keep)

    def save(self, fileobj: BinaryIO) -> None:
        gathered = self._gathered or [_packed(capture())]
        self._gathered = None
        dump(_RANDOM, [_unpacked(text) for text in gathered], fileobj)

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        saved: list[Generators] = parse(_RANDOM, fileobj)
        job = replicas.current()
        mine = _share(saved, job.rank, job.world_size)
        setters = [setter(name, value) for name, value in mine.items()]

        def apply() -> None:
            for set_generator in setters:
                set_generator()

        return apply


def _share(saved: list[Generators], rank: int, world_size: int) -> dict[str, torch.Tensor | int]:
    """For each generator, its state on `rank`, or a number to seed it with."""
    if len(saved) == world_size:
        return dict(saved[rank])
    mine: dict[str, torch.Tensor | int] = {}
    for name in saved[0]:
        states = [generators[name] for generators in saved if name in generators]
        alike = len(states) > 1 and all(torch.equal(states[0], other) for other in states[1:])
        if alike:
            mine[name] = states[0]
        elif rank < len(states):
            mine[name] = states[rank]
        else:
            data = b"".join(state.numpy().tobytes() for state in states)
            mine[name] = int(checksum(data + f"{name}/{rank}".encode()), 16)
    return mine


def _packed(generators: Generators) -> str:
    memory = io.BytesIO()
    torch.save(generators, memory)
    return base64.b64encode(memory.getvalue()).decode()


def _unpacked(text: str) -> Mapping[str, torch.Tensor]:
    found: Generators = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return found

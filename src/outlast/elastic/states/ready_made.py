"""Ready-made states for the parts of a training job, and the format of their content.

    ModuleState(model), OptimizerState(optimizer), SchedulerState(scheduler), CounterState()

`StateDictState` is for any object with `state_dict` and `load_state_dict`. A load reads and checks
all of the saved state before it changes anything; if it fails later, the old state is restored.

The content is torch's serialization, without anything that runs code: it is loaded with
`weights_only=True`. What could not be loaded is refused when it is saved, not after a job failure.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from outlast.async_checkpoint.plain_values import Unsavable, decode, encode
from outlast.elastic.states.state import PreparedState
from outlast.elastic.wrapped_modules import unwrapped
from outlast.system.units import listed

__all__ = [
    "CounterState",
    "EMAState",
    "ModuleState",
    "OptimizerState",
    "ScalerState",
    "SchedulerState",
    "StateDictState",
]

_FORMAT = 1
_SHOWN = 5


class StateDictState(PreparedState):
    """The state of any object with `state_dict` and `load_state_dict`.

    Args:
        source: the object, which this state keeps alive.

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
    """

    kind = "module"

    def __init__(self, module: nn.Module, name: str = "model") -> None:
        super().__init__(unwrapped(module), name)


class OptimizerState(StateDictState):
    """An optimizer. State that is spread over the replicas (`ZeroRedundancyOptimizer`) is gathered.

    Args:
        optimizer: unsharded on every replica; for sharded parameters use `ShardedState`.
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
    """

    kind = "scheduler"

    def __init__(self, scheduler: Any, name: str = "scheduler") -> None:
        super().__init__(scheduler, name)


class ScalerState(StateDictState):
    """A gradient scaler.

    Args:
        scaler: `torch.amp.GradScaler`, or like it.
    """

    kind = "scaler"

    def __init__(self, scaler: Any, name: str = "scaler") -> None:
        super().__init__(scaler, name)


class EMAState(StateDictState):
    """A moving average of the weights.

    Args:
        ema: `torch.optim.swa_utils.AveragedModel`, or another module or object like it.
    """

    kind = "ema"

    def __init__(self, ema: Any, name: str = "ema") -> None:
        super().__init__(unwrapped(ema) if isinstance(ema, nn.Module) else ema, name)


class CounterState(PreparedState):
    """Counters of training progress.

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


def dump(kind: str, value: Any, fileobj: BinaryIO) -> None:
    """Writes a value of what `async_checkpoint.plain_values` lists, for a `kind` of state; a
    `ValueError` if it could not be loaded, or holds sharded tensors.
    """
    _refuse_sharded(value)
    try:
        plain = encode(value)
    except Unsavable as e:
        place = f" ({e.where.lstrip('.')})" if e.where else ""
        raise ValueError(f"this state{place} cannot be saved: {e}") from e
    torch.save({"format": _FORMAT, "kind": kind, "value": plain}, fileobj)


def parse(kind: str, fileobj: BinaryIO, device: str = "cpu") -> Any:
    """Reads a value that `dump` wrote, with its tensors on `device`: `meta` reads only shapes. A
    `ValueError` if it is of another kind, or has a later format.
    """
    content = torch.load(fileobj, map_location=device, weights_only=True)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise ValueError("it was saved by another class of state")
    if content["format"] > _FORMAT:
        raise ValueError(
            f"it has format {content['format']}, and this outlast reads up to {_FORMAT}: "
            "update outlast"
        )
    if content["kind"] != kind:
        raise ValueError(f"{content['kind']!r} was saved, this is {kind!r}")
    return decode(content["value"])


def check_module(own: Mapping[str, Any], saved: Any) -> None:
    """Compares the state dict of a module with a saved one; a `ValueError` names what differs."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"a {type(saved).__name__} was saved, not the state of a module")
    differences = [
        *_few("only in the module", sorted(own.keys() - saved.keys())),
        *_few("only in the saved state", sorted(saved.keys() - own.keys())),
    ]
    shapes = []
    for key in sorted(own.keys() & saved.keys()):
        here, there = own[key], saved[key]
        if isinstance(here, UninitializedParameter | UninitializedBuffer):
            continue  # it takes any shape
        if not isinstance(here, torch.Tensor) or not isinstance(there, torch.Tensor):
            continue
        if here.shape != there.shape:
            shapes.append(f"{key} is {tuple(here.shape)}, {tuple(there.shape)} was saved")
    differences += _few("of another shape", shapes)
    if differences:
        raise ValueError("; ".join(differences))


def _few(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {listed(names, _SHOWN)}"] if names else []


def _is_sharded(value: Any) -> bool:
    # If the module is not imported, there are no DTensors; importing it is slow.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _refuse_sharded(value: Any) -> None:
    if _is_sharded(value):
        raise ValueError("its tensors are sharded: ShardedState saves such a module")
    if isinstance(value, dict | list | tuple) and not isinstance(value, torch.Size):
        for inner in value.values() if isinstance(value, dict) else value:
            _refuse_sharded(inner)

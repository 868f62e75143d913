"""A rank's *own* time of a step: from the end of the step before to the moment when its own
gradients are complete, without what it waits for other ranks in between.

The moment is that of a torch hook of the parameter whose gradient comes last. Where parameters are
sharded (FSDP2), no hook of a shard is called. On the CPU, torch waits for all collectives in
`Work.wait`: the own time then ends when the last wait of the step begins, that of the gradients.
On a device, the moments are events on the training stream, which are read later.

What is waited for: under the defaults of `DistributedDataParallel`, rank 0 broadcasts the buffers
before each forward pass, so that a fast rank waits there for a slow one; so does a collective that
the program runs itself. Both go through one Python function each, which is wrapped while a check is
running: DDP's `_pre_forward`, which broadcasts in C++, and `Work.wait`. A wait in another thread
than those that train is not theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from outlast.system.devices import on_accelerator
from outlast.system.streams import current_stream, has_times

_LEARNING_STEPS = 3

_Wait = tuple[Any, Any]
"""The moments at which a wait begins and ends."""


_End = tuple[Any, list[_Wait]]
"""The moment at which the own part of a step ends, and the waits before it."""


@dataclasses.dataclass(frozen=True)
class OwnTime:
    """A rank's own part of a step: when it began and ended, and its waits for other ranks."""

    began: Any
    ended: Any
    waits: list[_Wait]

    def seconds(self) -> float:
        waited = sum(_seconds(begun, over) for begun, over in self.waits)
        return _seconds(self.began, self.ended) - waited


def have_times(module: nn.Module) -> bool:
    """Whether the times of a module's steps can be taken."""
    device = _device_of(module.parameters())
    return device is None or has_times(device)


def _device_of(parameters: Iterable[torch.Tensor]) -> torch.device | None:
    return next((p.device for p in parameters if on_accelerator(p)), None)


class OwnTimes:
    """Takes the own times of this rank and its thread, step by step, until `close`."""

    def __init__(self, module: nn.Module) -> None:
        parameters = [p for p in module.parameters() if p.requires_grad and p.is_leaf]
        # All of one device: no time passes between events of two.
        device = _device_of(parameters)
        self._now: Callable[[], Any] = (
            time.perf_counter if device is None else functools.partial(_device_moment, device)
        )
        # Only on the CPU are all waits of FSDP seen.
        self._is_sharded = device is None and any(isinstance(p, DTensor) for p in parameters)
        self._waits = _Waits(self._now)
        self._last_gradient = _LastGradient(parameters, self._now, self._waits)
        self._began: Any = None

    def begin(self) -> None:
        self._waits.clear()
        self._began = self._now()

    def take(self) -> OwnTime | None:
        """The time of the step that has just ended; `None` if it is not known."""
        end = self._last_gradient.take()
        if self._is_sharded and self._last_gradient.is_silent:
            end = self._waits.last_begun()
        return None if self._began is None or end is None else OwnTime(self._began, *end)

    def close(self) -> None:
        self._last_gradient.remove()
        self._waits.stop()


class _LastGradient:
    """The moment at which the last gradient of a backward pass is complete.

    In the first steps, every parameter has a hook, to learn whose gradient comes last; then only
    that one has.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], now: Callable[[], Any], waits: _Waits
    ) -> None:
        self._now, self._waits = now, waits
        self._end: _End | None = None
        self._last: torch.Tensor | None = None
        self._left = _LEARNING_STEPS
        self._hooks = [p.register_post_accumulate_grad_hook(self._learn) for p in parameters]

    @property
    def is_silent(self) -> bool:
        """Whether no hook has been called."""
        return self._last is None and self._left == _LEARNING_STEPS

    def take(self) -> _End | None:
        """The end in the step that has ended; `None` if there was none, or while it learns."""
        end, self._end = self._end, None
        if self._left and self._last is not None:
            self._left -= 1
            if self._left == 0:
                self.remove()
                self._hooks = [self._last.register_post_accumulate_grad_hook(self._note)]
                self._last = None
            return None
        return end

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _learn(self, parameter: torch.Tensor) -> None:
        self._last = parameter
        self._waits.threads.add(threading.get_ident())  # on a device, autograd has its own

    def _note(self, parameter: torch.Tensor) -> None:
        # With gradient accumulation, the last of several backward passes counts.
        self._end = self._now(), self._waits.so_far()


class _Waits:
    """The waits of the threads that train, from its creation until `stop`."""

    _lock = threading.Lock()
    _running: tuple[_Waits, ...] = ()
    _originals: tuple[tuple[Any, str, Any], ...] = ()

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self._found: list[_Wait] = []
        self._inside = False
        self.threads = {threading.get_ident()}
        with _Waits._lock:
            if not _Waits._running:
                _Waits._originals = tuple(
                    (owner, name, getattr(owner, name)) for owner, name in _waiting_functions()
                )
                for owner, name, original in _Waits._originals:
                    setattr(owner, name, _timed(original))
            _Waits._running += (self,)

    def stop(self) -> None:
        """Restores the functions, unless another check needs them."""
        with _Waits._lock:
            _Waits._running = tuple(each for each in _Waits._running if each is not self)
            if _Waits._running:
                return
            for owner, name, original in _Waits._originals:
                setattr(owner, name, original)
            _Waits._originals = ()

    def so_far(self) -> list[_Wait]:
        """The waits since `clear`."""
        return list(self._found)

    def last_begun(self) -> _End | None:
        """When the last wait since `clear` began, and the waits before it."""
        if not self._found:
            return None
        *before, (begun, _) = self._found
        return begun, before

    def clear(self) -> None:
        self._found.clear()

    def call(self, function: Callable[[], Any]) -> Any:
        if self._inside or threading.get_ident() not in self.threads:
            return function()
        self._inside = True
        begun = self._now()
        try:
            return function()
        finally:
            self._found.append((begun, self._now()))
            self._inside = False


def _waiting_functions() -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = [(DistributedDataParallel, "_pre_forward"), (dist.Work, "wait")]
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def _timed(original: Any) -> Any:
    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        call: Callable[[], Any] = functools.partial(original, *args, **kwargs)
        for waits in _Waits._running:
            call = functools.partial(waits.call, call)
        return call()

    return timed


def _device_moment(device: torch.device) -> Any:
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def _seconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000

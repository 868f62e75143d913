"""The time that a rank waits for others, in the middle of its own part of a step.

Under the defaults of `DistributedDataParallel`, rank 0 broadcasts the buffers before each forward
pass, so that a fast rank waits there for a slow one; so does a collective that the program runs
itself. Both go through one Python function each, which is wrapped while a check is running: DDP's
`_pre_forward`, which broadcasts in C++, and `Work.wait`. A wait in another thread than those that
train is not theirs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Moments = tuple[Any, Any]
"""The begin and the end of a wait, as the function `now` of its `Waits` returns them."""


def _waiting_functions() -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = [(DistributedDataParallel, "_pre_forward")]
    if dist.is_available():
        found.append((dist.Work, "wait"))
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


class Waits:
    """The waits of the threads that train, from its creation until `stop`."""

    _lock = threading.Lock()
    _running: tuple[Waits, ...] = ()
    _originals: tuple[tuple[Any, str, Any], ...] = ()

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self._found: list[Moments] = []
        self._inside = False
        self.threads = {threading.get_ident()}
        with Waits._lock:
            if not Waits._running:
                Waits._originals = tuple(
                    (owner, name, getattr(owner, name)) for owner, name in _waiting_functions()
                )
                for owner, name, original in Waits._originals:
                    setattr(owner, name, _timed(original))
            Waits._running += (self,)

    def stop(self) -> None:
        """Restores the functions, unless another check needs them."""
        with Waits._lock:
            Waits._running = tuple(each for each in Waits._running if each is not self)
            if Waits._running:
                return
            for owner, name, original in Waits._originals:
                setattr(owner, name, original)
            Waits._originals = ()

    def so_far(self) -> list[Moments]:
        """The waits since `clear`."""
        return list(self._found)

    def before_last(self) -> tuple[Any, list[Moments]] | None:
        """When the last wait since `clear` began, and the waits before it."""
        if not self._found:
            return None
        *before, (begun, _) = self._found
        return begun, before

    def clear(self) -> None:
        """Begins anew."""
        self._found.clear()

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function that waits."""
        if self._inside or threading.get_ident() not in self.threads:
            return function()
        self._inside = True
        begun = self._now()
        try:
            return function()
        finally:
            self._found.append((begun, self._now()))
            self._inside = False


def _timed(original: Any) -> Any:
    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        call: Callable[[], Any] = functools.partial(original, *args, **kwargs)
        for waits in Waits._running:
            call = functools.partial(waits.call, call)
        return call()

    return timed

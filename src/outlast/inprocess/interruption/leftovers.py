"""What an interrupt leaves behind: changed modes of torch, and reports of errors that exist only
because the function was interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing import resource_sharer
from types import TracebackType
from typing import Any

import torch

from outlast.errors import RankShouldRestart

_LOADER = "_MultiProcessingDataLoaderIter.__del__"
_SHARER = resource_sharer.__file__
_DEVICE_TYPES = ("cpu", "cuda")


class QuietHooks:
    """The hooks for what a finalizer raises, and for what is not caught. They suppress two reports.

    - An interrupt in a finalizer: Python drops what a finalizer raises, and reports it.
    - In a process that was forked in the function, such as a worker of a data loader: the finalizer
      of an iterator that only the parent process can end, and the end of the connection through
      which the parent process was fetching a tensor.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._before: tuple[Callable[..., object], Callable[..., object]] | None = None

    def install(self) -> None:
        """Installs the hooks, in front of the present ones."""
        self._before = sys.unraisablehook, sys.excepthook
        sys.unraisablehook, sys.excepthook = self._unraisable, self._uncaught

    def restore(self) -> None:
        """Restores the hooks before, unless the user has installed others since."""
        if self._before is None:
            return
        if sys.unraisablehook == self._unraisable:
            sys.unraisablehook = self._before[0]
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._before[1]

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _unraisable(self, raised: Any) -> None:
        of_parent = self._forked and getattr(raised.object, "__qualname__", "") == _LOADER
        if self._before and raised.exc_type is not RankShouldRestart and not of_parent:
            self._before[0](raised)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        sharing = trace is not None and trace.tb_frame.f_code.co_filename == _SHARER
        ended = self._forked and sharing and isinstance(error, ConnectionError | EOFError)
        if self._before and not ended:
            self._before[1](kind, error, trace)


class TorchModes:
    """The modes of the current thread, at the moment when this is created.

    Gradient mode and autocast are flags of the thread. A context manager such as `torch.no_grad`
    changes one and changes it back in `__exit__`, which is Python: an interrupt may be raised at
    its first instruction, and then the flag stays. The function would be called again with
    gradients disabled, in that and every later iteration.
    """

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._autocast = {
            each: (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
            for each in _DEVICE_TYPES
        }
        self._autocast_cache = torch.is_autocast_cache_enabled()

    def restore(self) -> None:
        """Sets the modes of the current thread to the recorded ones."""
        torch.set_grad_enabled(self._gradients)
        for device_type, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        torch.clear_autocast_cache()  # it holds casts of the parameters of the last iteration

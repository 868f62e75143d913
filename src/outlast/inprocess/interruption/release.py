"""What is done after the function was left: process groups are released, and the rest that an
interrupt leaves behind is put in order.

Calling `destroy_process_group()` is not enough, for four reasons:

* A gloo worker thread may still be blocked (`gloo.py`). Its group's destructor would wait for
  that thread and, if a DDP module holds the last reference to the group, would hold the GIL while
  waiting. Therefore references to the groups are kept from the abort on, and their threads are
  woken before anything is destroyed.
* After an orderly `destroy_process_group()` of the function, a DDP module may hold the last
  reference too, and is destroyed with the function's frame. A worker thread that has just ended a
  collective needs the GIL to drop its tensors: the two wait for each other for ever (torch 2.13).
  So references are kept then, too. A group that no module has is destroyed at once: other ranks
  may wait for its connections to close.
* gloo's event loops wake up only every 10 ms, and the destructor waits for them. No rank needs to
  wait for the destructor: a separate thread drops the references. torch's destructor of a group
  runs without the GIL; where it does not (torch 2.6), these threads get the GIL before.
* torch's records of groups whose creation or destruction was interrupted must be cleared, above all
  the counter that names groups: if the ranks' counters differ, each waits for the others under a
  different name.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from outlast.errors import RankShouldRestart
from outlast.inprocess.interruption import communicators
from outlast.inprocess.interruption.gloo import GlooAbort, any_blocked, pair_sockets
from outlast.system import devices
from outlast.system.parallel import start_thread

log = logging.getLogger("outlast.inprocess")

_LOADER = "_MultiProcessingDataLoaderIter.__del__"
_SHARER = resource_sharer.__file__
_MOST_KEPT = 64
"""References to groups that the function has destroyed, until the end of the iteration."""
_OWN_REFERENCES = 2  # the variable, and the argument of `getrefcount`
_DESTROYS_WITH_THE_GIL = TorchVersion(torch.__version__) < "2.13"
"""Seen on 2.6: a worker thread that still needs it, after a collective, and the destructor wait for
each other for ever."""
_WORKERS_END_S = 0.02
_DRAIN_S = 5.0
"""How long worker threads may take to leave their waits before the release continues."""


_living: weakref.WeakSet[Releaser] = weakref.WeakSet()


@functools.cache
def _watch_forks() -> None:
    """A child process, such as a worker of a `DataLoader`, must not collect the garbage that it has
    inherited: in it, the destructor of a group waits for ever for threads that only the parent has.
    The handler cannot be removed; it does nothing outside of a wrapped function.
    """
    os.register_at_fork(after_in_child=lambda: gc.freeze() if _living else None)


class Releaser:
    """Releases the groups of each iteration."""

    def __init__(self) -> None:
        _watch_forks()
        _living.add(self)
        self._held: list[Any] = []
        self._thread: threading.Thread | None = None
        self._sockets: set[int] = set()

    def hold(self) -> None:
        """Keeps groups alive until `release()`. Called in the monitor thread, before the abort."""
        if dist.is_available():
            self._held.extend(list(dist.distributed_c10d._world.pg_map))

    @contextlib.contextmanager
    def keeping_destroyed(self) -> Iterator[None]:
        """In this block, `destroy_process_group` leaves a group that a module has to `release`, and
        each that would wait for other ranks while an exception is on its way.
        """
        if not dist.is_available():
            yield
            return
        destroy = dist.destroy_process_group

        @functools.wraps(destroy)
        def keeping(*args: Any, **kwargs: Any) -> None:
            group = args[0] if args else kwargs.get("group")
            if communicators.keep_if_failing(group):
                if group is None or group is dist.group.WORLD:
                    _forget_groups()
                return
            if len(self._held) > _MOST_KEPT:  # the function makes many, one after another
                old, self._held = self._held, []
                start_thread("outlast-release", devices.on_this_device(old.clear))
            groups = list(dist.distributed_c10d._world.pg_map)
            destroy(*args, **kwargs)
            if _DESTROYS_WITH_THE_GIL:
                time.sleep(_WORKERS_END_S)  # in which they get it
            while groups:
                group = groups.pop()  # the only reference, unless a module has it
                left = group in dist.distributed_c10d._world.pg_map
                if not left and sys.getrefcount(group) > _OWN_REFERENCES:
                    self._held.append(group)

        _rebind(destroy, keeping)
        try:
            yield
        finally:
            _rebind(keeping, destroy)

    def release(self) -> None:
        """Destroys all groups. Their descriptors and threads go away a moment later (`join`)."""
        self.join()
        if not dist.is_available():
            return
        held, self._held = [*self._held, *communicators.release_kept()], []
        held.extend(list(dist.distributed_c10d._world.pg_map))
        if held:
            _drain()
        if not communicators.can_be_destroyed():  # nor at the end of the process
            for each in held:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
            _forget_groups()
            return
        if dist.is_initialized():
            try:
                destroy = dist.destroy_process_group
                getattr(destroy, "__wrapped__", destroy)()
            except Exception:
                log.exception("a process group could not be destroyed; the restart continues")
        _forget_groups()
        if held:
            self._sockets = set(pair_sockets().values())
            self._thread = start_thread("outlast-release", devices.on_this_device(held.clear))
            del held  # the thread holds the last reference to the list
        if devices.in_use() is not None:
            # The next iteration needs the memory of this one's models, reference cycles included.
            self.join()
            gc.collect()

    def join(self) -> None:
        """Waits until the resources are freed; collects garbage if a cycle still holds a group."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._sockets and not self._sockets.isdisjoint(pair_sockets().values()):
            gc.collect()

    def end(self) -> None:
        """Ends the call, which leaves no group behind: there was none before it, and a group cannot
        be used for long after it, because its store ends with the call. So the function, or
        another one that makes its own group, can be called next.
        """
        self.release()
        self.join()


def _rebind(old: Any, new: Any) -> None:
    """In torch, and in all modules that have `from torch.distributed import ...`."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("destroy_process_group") is old:
            names["destroy_process_group"] = new


def _drain() -> None:
    """Waits until gloo's threads have left their waits; usually the first check finds none."""
    gloo = GlooAbort()
    deadline = time.monotonic() + _DRAIN_S
    while any_blocked() and time.monotonic() < deadline:
        gloo.wake_blocked(settled=not gloo.shut_down())
        time.sleep(0.002)  # no event is signaled when a gloo thread leaves a wait
    if _DESTROYS_WITH_THE_GIL:
        time.sleep(_WORKERS_END_S)


def _forget_groups() -> None:
    c10d = dist.distributed_c10d
    c10d._update_default_pg(None)
    for name in (
        "pg_map",
        "pg_names",
        "pg_group_ranks",
        "pg_backend_config",
        "pg_to_tag",
        "tags_to_pg",
        "pg_coalesce_state",
    ):
        getattr(c10d._world, name).clear()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    c10d._world.group_count = 0
    # What an operation returns has the mesh of an equal one before: with the old rank in it.
    if (tensor := sys.modules.get("torch.distributed.tensor._api")) is not None:
        tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", bool)()


_FATAL = 3  # c10's levels: INFO 0, WARNING 1, ERROR 2, FATAL 3

_guard = threading.Lock()
_silencing = 0
_level_before = 0


class QuietTorchLog:
    """Silences torch's C++ log in this process from `begin` to `end`, or as a context manager.

    An abort shuts down the sockets of process groups and of their store. For every operation that
    it ends there, torch logs a warning with a C++ stack trace, besides raising an error in the
    thread concerned. The log says nothing that those errors, or the report of the fault, do not.

    `begin` and `end` may be called repeatedly, from any thread. Several objects may overlap: the
    level returns to its value when the last one ends.
    """

    def __init__(self) -> None:
        self._active = False

    def begin(self) -> None:
        self._set(True)

    def end(self) -> None:
        self._set(False)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def _set(self, active: bool) -> None:
        global _silencing, _level_before
        level = _level()
        with _guard:
            if level is None or active == self._active:
                return
            self._active = active
            if active and not _silencing:
                _level_before, level.value = level.value, max(level.value, _FATAL)
            _silencing += 1 if active else -1
            if not _silencing:
                level.value = _level_before


@functools.cache
def _level() -> ctypes.c_int | None:
    """Torch's variable for `TORCH_CPP_LOG_LEVEL`, read only once; `None` in a build without it."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(
            ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD), "FLAGS_caffe2_log_level"
        )
    except (OSError, ValueError):
        return None


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


def _default_device() -> Any:
    """The mode that makes tensors on it. Torch's own function may open the device to tell it."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _function_modes() -> int:
    """How many modes of torch's functions are entered, besides that of the default device."""
    return torch._C._len_torch_function_stack() - (_default_device() is not None)


class ModesAtStart:
    """The modes of the current thread, and the working directory, at the moment when this is
    created: a relative path means the same in each iteration.

    Gradient mode and autocast are flags of the thread. A context manager such as `torch.no_grad`
    changes one and changes it back in `__exit__`, which is Python: an interrupt may be raised at
    its first instruction, and then the flag stays. The function would be called again with
    gradients disabled, in that and every later iteration. So would be the default dtype and device
    in which a model is made, and back again, when a fault comes in between.
    """

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._dtype = torch.get_default_dtype()
        self._device, self._function_modes = _default_device(), _function_modes()
        self._folder = os.getcwd() if os.path.isdir(".") else ""
        accelerator = devices.current()
        types = ["cpu", *([] if accelerator is None else [accelerator.type])]
        self._autocast = {
            each: (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
            for each in types
            if torch.amp.is_autocast_available(each)
        }
        self._autocast_cache = torch.is_autocast_cache_enabled()

    def restore(self) -> None:
        if os.path.isdir(self._folder):
            os.chdir(self._folder)
        torch.set_grad_enabled(self._gradients)
        torch.set_default_dtype(self._dtype)
        while _function_modes() > self._function_modes:
            torch._C._pop_torch_function_stack()  # as of `with torch.device("meta")`
        if _default_device() is not self._device:
            torch.set_default_device(None if self._device is None else self._device.device)
        for device_type, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        torch.clear_autocast_cache()  # it holds casts of the parameters of the last iteration

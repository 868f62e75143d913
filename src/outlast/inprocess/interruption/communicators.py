"""The communicators of the device, which belong to torch's process groups, and their aborts.

An abort waits for what it ends: for kernels, for a mutex that the function's thread may hold, and
for each CUDA graph that has captured a collective, which lives until the function's frames are
gone. So each runs in a thread of its own, `begin_aborts` waits for none of them, the function is
interrupted meanwhile, and `await_aborts` waits once it has been left.

A rank that has lost the job's store aborts none: the others would use the garbage that this leaves
in their collectives, as nobody can tell them of the end of the iteration before
(`elastic.job.live.queued`). It ends; if its thread waits for the device, by the hard timeout.

While an abort lives, nothing of its group may be destroyed: `shutdown` and the destructor wait for
the same mutex. Such a process cannot be used any more, and leaves for its replacement.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from outlast.errors import HealthCheckError
from outlast.inprocess.interruption.error_kinds import USER_REGION
from outlast.system import devices
from outlast.system.backends import Backend
from outlast.system.parallel import start_thread

log = logging.getLogger("outlast.inprocess")

_CYCLES_S = 0.5  # after which a captured graph may be in a reference cycle

_kept: list[Any] = []  # process groups that the function has destroyed, but that are only kept
_aborts: list[DeviceAbort] = []  # those begun in this iteration
_has_store = True


class DeviceAbort(NamedTuple):
    """The abort of one communicator."""

    group: Any
    backend: Backend
    thread: threading.Thread


def communicators() -> list[tuple[Any, Backend]]:
    """The process groups with a backend for the device, and that."""
    accelerator = devices.available()
    if accelerator is None or not dist.is_available():
        return []
    groups = dict.fromkeys([*dist.distributed_c10d._world.pg_map, *_kept])
    found = [(group, accelerator.communicator(group)) for group in groups]
    return [(group, backend) for group, backend in found if backend is not None]


def set_has_store(has_store: bool) -> None:
    """Whether the others can be told of an abort; without the store, none begins any more."""
    global _has_store
    _has_store = has_store


def begin_aborts() -> None:
    """Aborts all communicators, each in its thread, except those that are being aborted. Called
    again, it aborts those that were made since: a group may make one at any collective.
    """
    aborting = {id(each.group) for each in _living()}
    for group, backend in communicators() if _has_store else ():
        if id(group) not in aborting:
            thread = start_thread("outlast-abort-device", devices.on_this_device(_abort), backend)
            _aborts.append(DeviceAbort(group, backend, thread))


def _abort(backend: Backend) -> None:
    try:
        backend.abort()
    except RuntimeError:
        log.exception("a communicator of the device could not be aborted")


def _living() -> list[DeviceAbort]:
    return [each for each in _aborts if each.thread.is_alive()]


def await_aborts() -> None:
    """Waits for the aborts. Called when the function has been left, and its frames are gone.

    Raises:
        HealthCheckError: if one does not end. No group is ever destroyed then (`Releaser`).
    """
    wait_for_aborts(_CYCLES_S)
    if not can_be_destroyed():
        gc.collect()
        wait_for_aborts()
    _aborts[:] = stay = _living()
    if not stay:
        return
    names = ", ".join(f"{each.group.group_name} ({each.backend.name})" for each in stay)
    raise HealthCheckError(
        f"the abort of a process group has not ended within {stay[0].backend.abort_s:g} s: "
        f"{names}. This process leaves for its replacement"
    )


def wait_for_aborts(limit_s: float | None = None) -> None:
    """Waits for each abort: for as long as its backend may take, or for less."""
    begun = time.monotonic()
    for each in list(_aborts):
        most_s = each.backend.abort_s if limit_s is None else limit_s
        each.thread.join(max(0.0, begun + most_s - time.monotonic()))


def can_be_destroyed() -> bool:
    """Whether no abort lives: destroying a process group would wait for it."""
    return not _living()


def keep_if_failing(group: Any) -> bool:
    """Keeps the group that is to be destroyed, or all for `None`, if it has a communicator and an
    exception is on its way out of the function, and returns whether. To destroy a communicator is
    to wait for its other ranks, which may wait for this one, as in `finally:
    destroy_process_group()`: they hear of the fault once the exception has left the function. The
    same once an abort has begun, after which the function may go on until it is interrupted.
    """
    whole = group is None or group is dist.group.WORLD
    found = communicators() if _aborts or _is_failing() else []
    kept = [each for each, _ in found if whole or each is group]
    if kept:
        _kept.extend(dist.distributed_c10d._world.pg_map if whole else kept)
    return bool(kept)


def release_kept() -> list[Any]:
    """The groups kept, which are the caller's from now on. No abort is of this iteration then."""
    _aborts[:] = _living()
    kept = list(_kept)
    _kept.clear()
    return kept


def _is_failing() -> bool:
    """Whether an exception is being handled that a frame of the function has seen."""
    error = sys.exc_info()[1]
    seen_by = error.__traceback__.tb_frame if error and error.__traceback__ else None
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not USER_REGION and frame is not seen_by:
        frame = frame.f_back
    return frame is not None and frame is seen_by

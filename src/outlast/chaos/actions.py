"""Injects each kind of fault into the current process; all of them are real faults.

`fire` returns only if the process survives: after a SIGTERM that is handled, after the SIGCONT that
follows a SIGSTOP, and after it has killed another process (the monitor).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from outlast.chaos.kinds import Kind
from outlast.errors import ChaosError

if TYPE_CHECKING:
    import torch.distributed as dist

UNSENT_TAG = 0x6F75_7461
"""Tag of the message that `HANG_COLLECTIVE` waits for, and that no rank sends."""

HEADROOM_BYTES = 256 * 2**20
"""The maximum that is allocated before allocation fails."""

_CHUNK_BYTES = 8 * 2**20
_A_LONG_TIME_S = 1e6


def fire(
    kind: Kind | str,
    *,
    monitor_pid: int | None = None,
    group: dist.ProcessGroup | None = None,
    message: str = "a planned exception",
) -> None:
    """Injects a fault into this process, now.

    Args:
        kind: the kind of fault.
        monitor_pid: the process that `KILL_MONITOR` kills.
        group: the process group in which `HANG_COLLECTIVE` hangs; the default one if `None`.
        message: the message of the exception of `EXCEPTION`.

    Raises:
        ChaosError: for `EXCEPTION`; or, with the reason, if the fault is impossible.
        ValueError: if there is no such kind.
    """
    kind = Kind(kind)
    if kind is Kind.EXCEPTION:
        raise ChaosError(message)
    if kind is Kind.KILL_MONITOR:
        _kill_monitor(monitor_pid)
    elif kind is Kind.HANG_COLLECTIVE:
        _hang_collective(group)
    else:
        _ACTIONS[kind]()


def _send_self(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _exhaust_memory() -> NoReturn:
    """Allocates until allocation fails, frees all of it, and raises the `MemoryError`.

    The machine is not harmed: the process limits its own address space (`RLIMIT_AS`, the soft limit
    only) slightly above what it uses, then allocates, and writes to, the rest. The failure is real,
    and can hit every thread of the process while it lasts.
    """
    previous = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM_BYTES
    if previous[0] != resource.RLIM_INFINITY:
        limit = min(limit, previous[0])
    chunks: list[bytes] = []
    resource.setrlimit(resource.RLIMIT_AS, (limit, previous[1]))
    try:
        while True:
            chunks.append(b"\xff" * _CHUNK_BYTES)  # written, so that pages are really allocated
    except MemoryError as error:
        taken = len(chunks) * _CHUNK_BYTES
        # Otherwise the traceback of the new exception would keep them.
        chunks.clear()
        raise MemoryError(f"a planned MemoryError after {taken} bytes") from error
    finally:
        chunks.clear()
        resource.setrlimit(resource.RLIMIT_AS, previous)


def _oom_kill() -> None:
    try:
        _exhaust_memory()
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang_gil() -> None:
    # One thread locks a mutex twice: unlike sleep() or pause(), that wait does not return after a
    # signal handler has run, so only the death of the process ends it. PyDLL holds the GIL during
    # the call. All zeros are a valid, normal mutex.
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(256)
    lock(mutex)
    lock(mutex)


def _hang() -> NoReturn:
    while True:
        time.sleep(_A_LONG_TIME_S)


def _hang_collective(group: dist.ProcessGroup | None) -> None:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ChaosError(f"{Kind.HANG_COLLECTIVE}: torch.distributed is not initialized")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size < 2:
        raise ChaosError(f"{Kind.HANG_COLLECTIVE}: the group has only one rank")
    # A receive without a send, not an extra collective: that would be matched with the peers' next
    # collective, and corrupt it instead of hanging.
    config = dist.get_backend_config(group)
    device = "cpu" if "cpu:" in config and "cpu:nccl" not in config else "cuda"
    peer = (rank + 1) % size
    source = peer if group is None else dist.get_global_rank(group, peer)
    dist.recv(torch.zeros(1, device=device), src=source, group=group, tag=UNSENT_TAG)
    if device == "cuda":
        torch.cuda.synchronize()  # recv only enqueues the wait on the GPU


def _kill_monitor(pid: int | None) -> None:
    if pid is None:
        raise ChaosError(f"{Kind.KILL_MONITOR}: this rank has no monitor process")
    os.kill(pid, signal.SIGKILL)


_ACTIONS: dict[Kind, Callable[[], object]] = {
    Kind.SYSTEM_EXIT: lambda: sys.exit(1),
    Kind.SIGKILL: _send_self(signal.SIGKILL),
    Kind.SIGTERM: _send_self(signal.SIGTERM),
    Kind.SIGSTOP: _send_self(signal.SIGSTOP),
    Kind.SEGFAULT: lambda: ctypes.string_at(0),
    Kind.ABORT: os.abort,
    Kind.OUT_OF_MEMORY: _exhaust_memory,
    Kind.OOM_KILL: _oom_kill,
    Kind.HANG_GIL: _hang_gil,
    Kind.HANG: _hang,
}

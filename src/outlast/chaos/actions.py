"""Injects each kind of fault into the current process; all of them are real faults.

`fire` returns only if the process survives: after a SIGTERM that is handled, after the SIGCONT that
follows a SIGSTOP, and after faults that hit something else than the thread: another process, the
storage, the shared memory, the system calls of all threads.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from outlast.chaos.kinds import Kind
from outlast.errors import ChaosError
from outlast.system.arguments import Duration, as_timedelta
from outlast.system.parallel import start_thread

if TYPE_CHECKING:
    import torch.distributed as dist

    from outlast.chaos.writer_server import WriterServer

UNSENT_TAG = 0x6F75_7461
"""Tag of the message that `HANG_COLLECTIVE` waits for, and that no rank sends."""

HEADROOM_BYTES = 256 * 2**20
"""The maximum that is allocated before allocation fails."""

SNAPSHOT_MEMORY = "memfd:outlast-snapshot"
"""What the link of a descriptor of a snapshot's memory contains."""

_CHUNK_BYTES = 8 * 2**20
_A_LONG_TIME_S = 1e6
_SIGNALS_PER_SECOND = 2000
_one_storm = threading.Lock()
_FREEZE = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
pidfd = os.pidfd_open(pid)
signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
try:
    print(flush=True)
    time.sleep(seconds)
finally:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    except ProcessLookupError:
        pass
"""


def fire(
    kind: Kind | str,
    *,
    monitor_pid: int | None = None,
    group: dist.ProcessGroup | None = None,
    message: str = "a planned exception",
    seconds: Duration | None = None,
    writers: WriterServer | None = None,
    store_pid: int | None = None,
) -> None:
    """Injects a fault into this process, now.

    Args:
        monitor_pid: the process that `KILL_MONITOR` kills.
        group: the process group in which `HANG_COLLECTIVE` hangs; the default one if `None`.
        message: the message of the exception of `EXCEPTION`.
        seconds: how long the fault lasts, for kinds with a duration.
        writers: the writer processes, which run under an injector.
        store_pid: the process that `STORE_FROZEN` stops.

    Raises:
        ChaosError: for `EXCEPTION`; or, with the reason, if the fault is impossible.
        ValueError: if there is no such kind.
    """
    kind = Kind(kind)
    lasts = kind.default_seconds or 0.0
    if seconds is not None:
        lasts = as_timedelta("seconds", seconds, allow_zero=True).total_seconds()
    if kind.needs_writer and writers is None:
        raise ChaosError(f"{kind}: the writer processes do not run under an injector")
    match kind:
        case Kind.EXCEPTION:
            raise ChaosError(message)
        case Kind.KILL_MONITOR:
            if monitor_pid is None:
                raise ChaosError(f"{kind}: this rank has no monitor process")
            os.kill(monitor_pid, signal.SIGKILL)
        case Kind.HANG_COLLECTIVE:
            _hang_collective(group)
        case Kind.SIGSTOP if lasts:
            freeze(os.getpid(), lasts)
        case Kind.STORE_FROZEN:
            if store_pid is None:
                raise ChaosError(f"{kind}: no process of this user serves the store on this host")
            freeze(store_pid, lasts)
        case Kind.SIGNAL_STORM:
            start_thread("outlast-chaos-storm", _storm, lasts)
        case Kind.KILL_WRITER if writers is not None:
            writers.kill()
        case _ if kind.is_of_storage and writers is not None:
            writers.order(kind, lasts)
        case _:
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


def _hang_python() -> NoReturn:
    while True:
        pass


def _lose_shared_memory() -> None:
    """Truncates the memory of all snapshots of this process: its own, and those that it took over.
    Whatever reads or writes it afterwards gets SIGBUS, or an error from the kernel.
    """
    for entry in os.scandir("/proc/self/fd"):
        try:
            if SNAPSHOT_MEMORY in os.readlink(entry.path):
                os.truncate(entry.path, 0)
        except OSError:
            continue  # closed meanwhile by another thread


def _hang_collective(group: dist.ProcessGroup | None) -> None:
    import torch
    import torch.distributed as dist

    from outlast.coordination.collectives import device_of

    if not dist.is_initialized():
        raise ChaosError(f"{Kind.HANG_COLLECTIVE}: torch.distributed is not initialized")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size < 2:
        raise ChaosError(f"{Kind.HANG_COLLECTIVE}: the group has only one rank")
    # A receive without a send, not an extra collective: that would be matched with the peers' next
    # collective, and corrupt it instead of hanging.
    device = device_of(group)
    peer = (rank + 1) % size
    source = peer if group is None else dist.get_global_rank(group, peer)
    dist.recv(torch.zeros(1, device=device), src=source, group=group, tag=UNSENT_TAG)
    if device.type != "cpu":
        torch.accelerator.synchronize()  # recv only enqueues the wait on the device


def freeze(pid: int, seconds: float) -> None:
    """Stops a process for some seconds; it may be this one. Returns when it has stopped, or, for
    this process, when it runs again. Another process, which outlives this one, makes it continue.
    """
    # Without site: it starts in a few milliseconds, and needs nothing but the standard library.
    command = [sys.executable, "-I", "-S", "-c", _FREEZE, str(pid), str(seconds)]
    helper = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    assert helper.stdout is not None
    with helper.stdout:
        helper.stdout.readline()
    start_thread("outlast-chaos-reap", helper.wait)


def server_of(port: int) -> int | None:
    """The process that listens at this TCP port, if it is on this host and of this user."""
    import psutil  # not above: elsewhere than on Linux, importing `outlast.chaos` must say so

    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
        if listens and connection.pid is not None:
            return int(connection.pid)
    return None


def _storm(seconds: float) -> None:
    """Sends every thread of this process signals for some seconds, about 2000 a second.

    The signal is SIGWINCH, with a handler in C that does nothing: it interrupts the system calls of
    threads that know nothing of Python. Python's own handler and the default action, both of which
    leave the process alone, are restored at the end.
    """
    with _one_storm:  # each restores what it has found
        libc = ctypes.CDLL(None, use_errno=True)
        number = signal.SIGWINCH
        # Any function with one integer argument and no effect is a valid handler. `sigaction`
        # replaces what Python has installed, without SA_RESTART: system calls return EINTR.
        action = SigAction(ctypes.cast(libc.abs, ctypes.c_void_p).value)
        before = SigAction()
        if libc.sigaction(number, ctypes.byref(action), ctypes.byref(before)):
            raise OSError(ctypes.get_errno(), "sigaction")
        own, pid = threading.get_native_id(), os.getpid()
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                threads = [int(name) for name in os.listdir("/proc/self/task")]
                for thread in threads:
                    if thread != own:
                        libc.tgkill(pid, thread, number)  # one that has ended is no error
                time.sleep(len(threads) / _SIGNALS_PER_SECOND)
        finally:
            libc.sigaction(number, ctypes.byref(before), None)


class SigAction(ctypes.Structure):
    """`struct sigaction` of glibc, the same on x86-64 and arm64."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


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
    Kind.HANG_PYTHON: _hang_python,
    Kind.LOST_SHARED_MEMORY: _lose_shared_memory,
}

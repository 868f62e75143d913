"""Faults that something else carries out: a process stopped for a time, a storm of signals."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

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
    threading.Thread(target=helper.wait, name="outlast-chaos-reap", daemon=True).start()


def server_of(port: int) -> int | None:
    """The process that listens at this TCP port, if it is on this host and of this user."""
    import psutil  # not above: elsewhere than on Linux, importing `outlast.chaos` must say so

    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
        if listens and connection.pid is not None:
            return int(connection.pid)
    return None


def start_signal_storm(seconds: float) -> None:
    """Sends every thread of this process signals for some seconds, about 2000 a second, in the
    background.

    The signal is SIGWINCH, with a handler in C that does nothing: it interrupts the system calls of
    threads that know nothing of Python. Python's own handler and the default action, both of which
    leave the process alone, are restored at the end.
    """
    threading.Thread(
        target=_storm, args=(seconds,), name="outlast-chaos-storm", daemon=True
    ).start()


def _storm(seconds: float) -> None:
    with _one_storm:  # each restores what it has found
        _send_signals(seconds)


def _send_signals(seconds: float) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    number = signal.SIGWINCH
    # Any function with one integer argument and no effect is a valid handler. `sigaction` replaces
    # what Python has installed, without SA_RESTART: system calls return EINTR.
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

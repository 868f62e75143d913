"""A process that is stopped for a time, a storm of signals, and the process that serves a store."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from outlast.chaos import fire
from outlast.chaos.actions import SigAction, server_of
from outlast.errors import ChaosError
from procs import NET_S


def test_a_frozen_process_continues_by_itself() -> None:
    with subprocess.Popen(["sleep", "1000"]) as frozen:
        try:
            process, deadline = psutil.Process(frozen.pid), time.monotonic() + NET_S
            fire("store_frozen", store_pid=frozen.pid, seconds=0.3)
            for status in (psutil.STATUS_STOPPED, psutil.STATUS_SLEEPING):
                while process.status() != status:
                    assert time.monotonic() < deadline
        finally:
            frozen.kill()


def test_a_process_that_is_stopped_by_itself_continues() -> None:
    program = 'from outlast.chaos import fire; fire("sigstop", seconds=0.2); print("on")'
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as stopped:
        assert os.waitid(os.P_PID, stopped.pid, os.WSTOPPED) is not None
        assert stopped.communicate(timeout=NET_S)[0] == b"on\n"


def test_a_storm_interrupts_system_calls_of_any_thread_and_ends() -> None:
    before = _handler(signal.SIGWINCH)
    libc = ctypes.CDLL(None, use_errno=True)
    found: list[tuple[int, int]] = []

    def wait() -> None:
        found.append((libc.poll(None, 0, int(NET_S * 1000)), ctypes.get_errno()))

    waiting = threading.Thread(target=wait)
    waiting.start()
    fire("signal_storm", seconds=0.3)
    waiting.join()
    assert found == [(-1, errno.EINTR)]
    deadline = time.monotonic() + NET_S
    while _handler(signal.SIGWINCH) != before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_server_of_a_store_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert server_of(port) == os.getpid()
    assert server_of(port) is None
    with pytest.raises(ChaosError, match="no process of this user serves the store on this host"):
        fire("store_frozen")


def _handler(number: int) -> int | None:
    """The address of the handler in C."""
    found = SigAction()
    assert ctypes.CDLL(None).sigaction(number, None, ctypes.byref(found)) == 0
    address: int | None = found.handler
    return address

"""Forked children and the signals that a scheduler sends to all processes of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from outlast.system.waiting import readable
from procs import default_signals

# A parent with a helper, which writes a letter for each one that it reads.
PARENT = """
import os, signal
from outlast.system.fork import fork_detached

def answer():
    while letter := os.read(0, 1):
        os.write(1, letter)

print(fork_detached(answer, new_session=True), flush=True)
os.close(0)
os.close(1)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_helper_outlives_a_signal_as_long_as_its_parent_lives(number: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=default_signals
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        pidfd = os.pidfd_open(helper)
        try:
            for _ in range(3):
                os.kill(helper, number)
                os.write(parent.stdin.fileno(), b"x")
                assert os.read(parent.stdout.fileno(), 1) == b"x"
            parent.kill()
            parent.wait()
            os.kill(helper, number)
            assert readable(pidfd, timeout=30.0)
        finally:
            parent.kill()
            os.close(pidfd)

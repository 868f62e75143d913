"""Forked children and the signals that a scheduler sends to all processes of a job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.system.processes import readable
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


# The child gets the signal inside of `fork`, before Python runs in it.
IN_CHILD = """
#include <pthread.h>
#include <signal.h>
static void child(void) { raise(SIGTERM); }
void install(void) { pthread_atfork(0, 0, child); }
"""
EARLY = """
import ctypes, os, signal, sys
from outlast.system.fork import keep_signals_at_forks
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
ctypes.CDLL(sys.argv[1]).install()
keep_signals_at_forks()
for _ in range(2):
    if (pid := os.fork()) == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_signal_that_a_child_gets_before_it_runs_is_not_lost(tmp_path: Path) -> None:
    library = str(tmp_path / "in_child.so")
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(compiler, input=IN_CHILD.encode(), check=True)
    subprocess.run([sys.executable, "-c", EARLY, library], check=True, timeout=60)

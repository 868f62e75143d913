"""Background processes: silent, detached, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from outlast.system.background_process import BackgroundProcess, start_process
from outlast.system.processes import UNKNOWN_EXIT

TESTS = str(Path(__file__).parents[1])
PROGRAM = "system.programs"
NET_S = 60.0


@pytest.fixture(autouse=True)
def _find_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", TESTS)


def started(how: str, *arguments: str) -> tuple[BackgroundProcess, dict[str, Any]]:
    process = start_process(PROGRAM, arguments=[how, *arguments])
    return process, json.loads(process.channel.receive()[0])


def test_it_is_quiet_and_on_its_own() -> None:
    process, facts = started("waits", "an argument")
    assert process.alive
    assert process.exit_code is None
    assert facts["arguments"] == ["waits", "an argument"]
    assert facts["nice"] >= 7
    assert facts["io"] == [psutil.IOPRIO_CLASS_BE, 7]
    assert facts["session"]
    assert facts["interrupt"]
    assert facts["stdin"] == os.devnull
    assert not facts["inheritable"]
    assert not facts["torch"]
    assert process.close(NET_S) == 0
    assert process.close() == 0
    assert process.exit_code == 0
    assert not psutil.pid_exists(process.pid)


def test_its_exit_code() -> None:
    process, _ = started("exit")
    assert process.wait(NET_S) == 3
    assert not process.alive
    with pytest.raises(EOFError):
        process.channel.receive()
    assert process.close() == 3


def test_it_is_killed_when_it_does_not_end() -> None:
    process, _ = started("stubborn")
    assert process.wait(0.0) is None
    assert process.close(timeout=0.01) == -signal.SIGKILL


def test_kill() -> None:
    process, _ = started("stubborn")
    process.kill()
    assert process.wait(NET_S) == -signal.SIGKILL
    process.kill()
    assert process.close() == -signal.SIGKILL


def test_one_that_somebody_else_reaps_has_no_known_code() -> None:
    process, _ = started("exit")
    os.waitpid(process.pid, 0)
    assert process.wait(NET_S) == UNKNOWN_EXIT
    process.close()


def test_one_that_nobody_closed_ends_by_itself() -> None:
    process, _ = started("waits")
    child = psutil.Process(process.pid)
    del process  # every test's leak check covers the descriptors
    child.wait(NET_S)


PARENT = """
import os, signal, sys
from outlast.system.background_process import start_process
process = start_process(sys.argv[1], arguments=sys.argv[2:])
process.channel.receive()
print(process.pid, flush=True)
if sys.argv[2] == "waits" and os.fork() == 0:
    signal.alarm(60)  # a fork that holds the channel open; the test kills its process group
signal.pause()
"""


@contextlib.contextmanager
def killed_parent(*arguments: str) -> Iterator[int]:
    """A pidfd of a background process whose parent is killed now."""
    command = [sys.executable, "-c", PARENT, PROGRAM, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        try:
            yield pidfd
        finally:
            os.close(pidfd)
            with contextlib.suppress(ProcessLookupError):  # nobody was left
                os.killpg(parent.pid, signal.SIGKILL)


def ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(NET_S * 1000))


def test_one_that_outlives_its_parent_is_told_by_the_channel(tmp_path: Path) -> None:
    with killed_parent("outlives", str(tmp_path / "out")) as pidfd:
        assert ended(pidfd)
    assert (tmp_path / "out").read_text() == "wrote after the end"


def test_one_that_ends_with_its_parent_needs_no_end_of_the_channel() -> None:
    with killed_parent("waits") as pidfd:
        assert ended(pidfd)

"""The orphan killer kills the marked processes when the lease of the host is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.launch.agent import orphan_killer
from outlast.system import lease_page
from outlast.system.lease_page import LeasePage

NET_S = 60.0

# A stand-in for the agent: starts the orphan killer as its child, says so, and sleeps.
AGENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), *sys.argv[2:]])
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[LeasePage]:
    page = LeasePage.create(tmp_path)
    yield page
    page.close()


class Host:
    """An agent with its orphan killer, and workers."""

    def __init__(self, page: LeasePage) -> None:
        self.mark = f"OUTLAST_TEST_MARK={uuid.uuid4().hex}"
        self.agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, orphan_killer.__file__, self.mark, "", str(page.path)],
            stdout=subprocess.PIPE,
        )
        assert self.agent.stdout is not None
        assert self.agent.stdout.readline() == b"ready\n"
        self.workers: list[subprocess.Popen[bytes]] = []

    def worker(self) -> subprocess.Popen[bytes]:
        name, _, value = self.mark.partition("=")
        environment = {**os.environ, name: value}
        self.workers.append(subprocess.Popen(["sleep", "3600"], env=environment))
        return self.workers[-1]

    def close(self) -> None:
        for process in (*self.workers, self.agent):
            process.kill()
            process.wait()
        assert self.agent.stdout is not None
        self.agent.stdout.read()  # until the orphan killer has ended too
        self.agent.stdout.close()


@pytest.fixture
def host(page: LeasePage) -> Iterator[Host]:
    host = Host(page)
    yield host
    host.close()


def test_a_lease_that_is_over_kills_the_workers_of_a_stopped_agent(
    host: Host, page: LeasePage
) -> None:
    worker = host.worker()
    deadline = lease_page.now() + 0.3
    page.renew(deadline)
    host.agent.send_signal(signal.SIGSTOP)
    assert worker.wait(NET_S) == -signal.SIGKILL
    assert lease_page.now() >= deadline
    late = host.worker()  # started while the lease is over
    assert late.wait(NET_S) == -signal.SIGKILL


def test_a_renewed_lease_keeps_the_workers(host: Host, page: LeasePage) -> None:
    page.renew(lease_page.now() + 0.2)
    first = host.worker()
    assert first.wait(NET_S) == -signal.SIGKILL
    page.renew(lease_page.now() + NET_S)  # the agent joined again
    kept = host.worker()
    with pytest.raises(subprocess.TimeoutExpired):
        kept.wait(3 * orphan_killer.AGAIN_S)
    page.renew(lease_page.now())
    # The orphan killer sleeps until the deadline that it read; a killed agent wakes it at once.
    host.agent.kill()
    assert kept.wait(NET_S) == -signal.SIGKILL


def test_without_a_lease_nothing_is_killed(host: Host, page: LeasePage) -> None:
    worker = host.worker()
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(3 * orphan_killer.AGAIN_S)
    host.agent.kill()
    assert worker.wait(NET_S) == -signal.SIGKILL

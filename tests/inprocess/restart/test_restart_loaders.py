"""The interrupt in a data loader with workers is not reported; a debugger is not interrupted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from inprocess.job_output import errors, full, views
from outlast.inprocess.monitor.loader_workers import activity
from procs import Job

SCRIPT = Path(__file__).parent.parent / "scripts" / "loaders.py"
Ranks = Callable[..., Job]


@pytest.mark.slow
def test_the_end_of_a_data_loader_is_not_interrupted(ranks: Ranks) -> None:
    with ranks("loaders", "loads", nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {k: full(2) for k in range(4)}
        for noise in ("Exception ignored", "swallowed", "resource_sharer", "child process"):
            assert noise not in errors(job), errors(job)


def test_a_worker_that_has_ended_is_not_waited_for() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it stays, until it is waited for
    assert activity(child) == 0
    os.waitpid(child, 0)
    assert activity(child) == 0
    assert activity(os.getpid()) > 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_worker_that_waits_for_ever_is_a_hang(ranks: Ranks) -> None:
    """A slow one, in the next iteration, is none."""
    with ranks("loaders", "waits_for_a_worker", nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        assert views(job) == {0: full(2), 1: full(2)}
        found = re.search(
            r"no progress until the soft timeout; .* scripts/loaders.py:\d+ waits_for_a_worker;",
            job.errors(0),
        )
        assert found, job.errors(0)


def test_a_child_process_does_not_destroy_groups_of_its_parent(ranks: Ranks) -> None:
    """Their destructor would wait there for ever: for threads that only the parent has."""
    with ranks("loaders", "forks", nprocs=2) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, errors(job)
        for each in range(2):
            statuses = [line["status"] for line in job.lines(each) if line["event"] == "child"]
            assert statuses == [0]


@pytest.mark.slow
def test_a_user_in_the_debugger_is_no_hang() -> None:
    ours, theirs = os.openpty()
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, str(SCRIPT), "is_debugged"]
    with subprocess.Popen(
        command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        told = ""
        try:
            while '"late"' not in told:
                told += os.read(ours, 4096).decode()
            os.write(ours, b"answer = 42\nc\n")
            with suppress(OSError):  # EIO: the other end is closed
                while read := os.read(ours, 4096):
                    told += read.decode()
        finally:
            process.kill()
            os.close(ours)
    assert process.returncode == 0, told
    lines = [line[line.index("{") :] for line in told.splitlines() if '{"event"' in line]
    found = [json.loads(line) for line in lines]
    assert [line["event"] for line in found].count("entered") == 1, told
    assert found[-1]["value"] == 42, told
    assert "no progress" not in told

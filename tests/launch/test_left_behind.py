"""No process is left behind, whichever process died."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launch.runs import WORKER, Run, ends
from outlast.launch.workers import exec_shim

# Starts a helper, and says which; the helper lives until it is killed.
HELPER = """
import signal, subprocess, sys
code = "import signal\\nif %r: signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" % DEAF
code += "print(flush=True)\\nwhile True: signal.pause()"
def start(**more):
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **more)
    p.stdout.readline()
    return p.pid
"""
# Each worker has a helper in its process group, and one in a separate session, started by a process
# that has ended, so that the second helper is not a descendant of the worker.
HELPERS = (
    HELPER
    + """
near = start()
far = int(subprocess.check_output([sys.executable, "-c", FAR]))
"""
    + WORKER.replace('"env": env', '"env": env, "near": near, "far": far')
)


def helpers(deaf: bool) -> str:
    ours = f"DEAF = {deaf}\n"
    return f"{ours}FAR = {ours + HELPER + 'print(start(start_new_session=True))'!r}\n{HELPERS}"


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [False, True])
def test_helpers_end_with_the_job(tmp_path: Path, deaf: bool) -> None:
    with Run(tmp_path, helpers(deaf), "--nproc-per-node=1", "--grace=0.2") as run:
        worker = run.ready(0)
        worker.succeed()
        assert run.wait() == 0
        assert run.alive() == []


@pytest.mark.slow
def test_a_dead_workers_group_ends_with_it(tmp_path: Path) -> None:
    with Run(tmp_path, helpers(deaf=True), "--nproc-per-node=2", "--grace=0.2") as run:
        first = run.start_job(2)
        first[1].kill()
        second = run.ready(1)
        assert ends(first[1].more["near"])
        # A helper in a separate session may have to do what the worker no longer could.
        assert psutil.pid_exists(first[1].more["far"])
        assert run.complete(first[0], second) == 0


@pytest.mark.slow
def test_helpers_end_before_the_next_attempt(tmp_path: Path) -> None:
    options = ("--nproc-per-node=1", "--max-restarts=1")
    with Run(tmp_path, helpers(deaf=True), *options) as run:
        first = run.ready(0)
        first.fail()
        second = run.ready(0)
        for name in ("near", "far"):
            assert not psutil.pid_exists(first.more[name])
        second.succeed()
        assert run.wait() == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_launcher_killed(tmp_path: Path, wrapped: bool) -> None:
    with Run(tmp_path, helpers(deaf=True), "--nproc-per-node=2") as run:
        for rank in range(2):
            run.ready(rank)
        if wrapped:
            run.set_job("running")
        there = run.alive()
        # Two workers with two helpers each, and the orphan killer.
        assert len(there) == 7
        run.process.send_signal(signal.SIGKILL)
        for process in there:
            assert ends(process.pid), process
    assert list(run.temporary.iterdir()) == []


def test_the_launcher_and_the_orphan_killer_killed_at_once(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2") as run:
        workers = [run.ready(rank) for rank in range(2)]
        (orphan_killer,) = orphan_killers(run)
        for process in (orphan_killer, psutil.Process(run.process.pid)):
            process.send_signal(signal.SIGSTOP)  # so that neither sees the other's end
        for process in (orphan_killer, psutil.Process(run.process.pid)):
            process.send_signal(signal.SIGKILL)
        for worker in workers:
            assert ends(worker.pid)


def test_a_killed_orphan_killer_is_restarted(tmp_path: Path) -> None:
    with Run(tmp_path, helpers(deaf=True), "--nproc-per-node=2") as run:
        workers = run.start_job(2)
        (first,) = orphan_killers(run)
        first.kill()
        assert ends(first.pid)
        workers[1].kill()
        run.ready(1)  # so the launcher has seen all that ended before
        there = run.alive()
        assert [p.pid for p in orphan_killers(run)] != [first.pid]
        run.process.send_signal(signal.SIGKILL)
        for process in there:
            assert ends(process.pid), process


def test_nothing_is_left_of_a_good_run(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2") as run:
        for rank in range(2):
            run.ready(rank).succeed()
        assert run.wait() == 0
        assert run.alive() == []
    assert list(run.temporary.iterdir()) == []


def orphan_killers(run: Run) -> list[psutil.Process]:
    found = []
    for process in run.alive():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "orphan_killer.py" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_a_worker_whose_launcher_is_gone_does_not_start() -> None:
    # This process is not the launcher that the shim was given.
    command = [sys.executable, "-I", "-S", exec_shim.__file__, str(os.getppid()), "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", exec_shim.NOT_RUNNABLE)

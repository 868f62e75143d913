"""Signals to the launcher reach the workers; workers that stay are killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launch.runs import WORKER, Run

TELLS = WORKER.replace(
    "names =",
    "def tell(number, _):\n"
    "    print('got', signal.Signals(number).name, flush=True)\n"
    "    if '--stay' not in sys.argv: sys.exit(0)\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, tell)\n"
    "names =",
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_signal_reaches_the_workers_as_it_is(
    tmp_path: Path, number: signal.Signals, wrapped: bool
) -> None:
    with Run(tmp_path, TELLS, "--nproc-per-node=2", "--max-restarts=3") as run:
        for rank in range(2):
            run.ready(rank)
        if wrapped:
            run.set_job("running")
        run.process.send_signal(number)
        assert run.wait() == 128 + number
    for rank in range(2):
        assert f"[{rank}] got {number.name}" in run.out.splitlines()
    assert run.verdict == f"job ended by {number.name}, exit code {128 + number},"


def test_signals_that_its_parent_has_blocked_reach_it(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        started = Run(tmp_path, TELLS, "--nproc-per-node=2")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with started as run:
        worker, _ = run.ready(0), run.ready(1)
        worker.kill()  # noticed by SIGCHLD
        run.until(lambda: "[1] got SIGTERM" in run.out.splitlines(), "the other to be ended")
        assert run.wait() == 128 + signal.SIGKILL


def test_after_the_grace_time_workers_are_killed(tmp_path: Path) -> None:
    with Run(tmp_path, TELLS, "--nproc-per-node=2", "--grace=0.2", args=["--stay"]) as run:
        for rank in range(2):
            run.ready(rank)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    assert "still running, killed: rank 0, 1" in run.words


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    with Run(tmp_path, TELLS, "--nproc-per-node=2", "--grace=1000", args=["--stay"]) as run:
        for rank in range(2):
            run.ready(rank)
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: run.out.count("got SIGINT") == 2, "both to be interrupted")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT


def test_later_signals_reach_the_workers_too(tmp_path: Path) -> None:
    with Run(tmp_path, TELLS, "--nproc-per-node=1", "--grace=1000", args=["--stay"]) as run:
        worker = run.ready(0)
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: "got SIGINT" in run.out, "the first")
        run.process.send_signal(signal.SIGTERM)
        run.until(lambda: "got SIGTERM" in run.out, "the second")
        worker.succeed()
        assert run.wait() == 128 + signal.SIGINT


def test_no_replacement_while_the_job_ends(tmp_path: Path) -> None:
    with Run(tmp_path, TELLS, "--nproc-per-node=2", "--grace=1000", args=["--stay"]) as run:
        first = run.start_job(2)
        run.process.send_signal(signal.SIGTERM)
        run.until(lambda: run.out.count("got SIGTERM") == 2, "both to be asked")
        first[0].kill()
        first[1].kill()
        assert run.wait() == 128 + signal.SIGTERM
    assert not any("replacement" in line for line in run.words)


def test_a_stopped_worker_is_killed_too(tmp_path: Path) -> None:
    with Run(tmp_path, TELLS, "--nproc-per-node=2", "--grace=0.2") as run:
        first = [run.ready(rank) for rank in range(2)]
        first[1].kill(signal.SIGSTOP)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    assert "still running, killed: rank 1" in run.words


TOLD = WORKER.replace(
    "names =",
    "if os.environ['RANK'] == '0':\n"
    "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
    "names =",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "saved", "how"),
    [
        ("running", True, "stopped by SIGTERM: saved"),
        ("running", False, "ended by SIGTERM: NOT saved"),
        ("completed", False, "ended by SIGTERM"),
    ],
)
def test_a_worker_that_has_not_begun_takes_no_part_in_the_last_save(
    tmp_path: Path, state: str, saved: bool, how: str
) -> None:
    """The signal kills it, while the others save, or do not."""
    with Run(tmp_path, TOLD, "--nproc-per-node=2") as run:
        for rank in range(2):
            run.ready(rank)
        run.set_job(state, prefix="call/")
        run.store().put("call/stop", b'{"reason": "a signal", "exit_code": 143}')
        if saved:
            run.store().put("call/stopped", b"step 5 is saved")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    assert run.verdict == f"job {how}, exit code 143,"


def test_a_job_that_saves_is_not_killed_at_the_end_of_the_grace_time(tmp_path: Path) -> None:
    with Run(tmp_path, TELLS, "--nproc-per-node=1", "--grace=0.2", args=["--stay"]) as run:
        worker = run.ready(0)
        run.set_job("running", prefix="call/")
        run.store().put("call/last-save", b"1000")
        run.process.send_signal(signal.SIGTERM)
        run.until_said("the job is saving: it has 1000 s more")
        worker.succeed()
        assert run.wait() == 128 + signal.SIGTERM
    assert "still running, killed" not in run.err

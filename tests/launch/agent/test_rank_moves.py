"""`outlast drain --rank` in a job on one host: the rank goes on in another process."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.runs import Run
from outlast.coordination.job_record import JobState
from outlast.launch.agent.rank_moves import RankMoves
from outlast.launch.cli import app

TRAINS = '''
"""Trains until the file `go` is there, and some steps more; says each step."""
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import outlast
from outlast.inprocess import Wrapper

if "OUTLAST_SUCCEEDS" in os.environ:
    Path(f"successor-{os.getpid()}").touch()
    while Path("hold").exists():
        time.sleep(0.01)
    if Path("fail").exists():
        raise SystemExit("the device is gone")

@Wrapper()
def train(call):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = torch.nn.Linear(1, 1)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    with outlast.Job("state", model=net, optimizer=optimizer, every=None) as job:
        job.restore()
        print(json.dumps({"pid": os.getpid(), "rank": rank, "env": {}}), flush=True)
        last = None
        while last is None or job.steps < last:
            call.ping()
            optimizer.zero_grad()
            model(torch.ones(1, 1) * rank).sum().backward()
            optimizer.step()
            job.step()
            print(f"step {job.steps} of {rank}", flush=True)
            done = torch.tensor(int(Path("go").exists()))
            dist.all_reduce(done, dist.ReduceOp.MIN)
            last = last or (job.steps + 3 if done else None)
            time.sleep(0.02)
    if rank == 0:
        print("ended", [p.tolist() for p in net.parameters()], job.steps, flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    train()
'''


def trains(tmp_path: Path, *options: str) -> Run:
    return Run(tmp_path, TRAINS, "--nproc-per-node=2", f"--rdzv-id={tmp_path.name}", *options)


def drain(tmp_path: Path, rank: int, *options: str) -> str:
    """What the command has said, once the ranks can agree on a step."""
    name = f"--rdzv-id={tmp_path.name}"
    while True:
        done = CliRunner().invoke(app, ["drain", f"--rank={rank}", name, *options])
        assert done.exit_code == ("error" in done.output), done.output
        if "not in the steps" not in done.output:
            return done.output


def check_ended(run: Run, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.err
    steps = Counter(re.findall(r"step \d+ of \d", run.out))
    assert set(steps.values()) == {1}, steps


@pytest.mark.slow
def test_a_rank_moves_and_no_step_is_made_again(tmp_path: Path) -> None:
    with trains(tmp_path) as run:
        before = [run.ready(0), run.ready(1)]
        assert "is to move" in drain(tmp_path, 1, "--reason=it leaks")
        after = [run.ready(0), run.ready(1)]
        assert after[0].pid == before[0].pid
        assert after[1].pid != before[1].pid
        run.until_said(f"rank 1 has moved from pid {before[1].pid} to pid {after[1].pid}")
        check_ended(run, tmp_path)
    assert "rank 1 leaves after step" in run.err
    assert "it leaks" in run.err
    assert "1 move" in run.words[-1]
    assert "restart" not in run.words[-1]


@pytest.mark.slow
def test_a_successor_that_fails_is_named_and_the_rank_stays(tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    with trains(tmp_path) as run:
        before = [run.ready(0), run.ready(1)]
        drain(tmp_path, 0)
        run.until_said(f"rank 0 does not move: it stays in pid {before[0].pid}")
        check_ended(run, tmp_path)
    assert len(re.findall(r"successor of rank 0 .* with code 1: the device is gone", run.err)) == 3
    assert "move" not in run.words[-1]
    assert "restart" not in run.words[-1]


@pytest.mark.slow
def test_a_rank_that_dies_first_is_replaced_by_its_successor(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with trains(tmp_path) as run:
        before = [run.ready(0), run.ready(1)]
        drain(tmp_path, 1)
        successor = run.until(lambda: list(tmp_path.glob("successor-*")), "the successor")
        assert "rank 1 is about to move already" in drain(tmp_path, 1)
        before[1].kill()
        run.until_said(", which was to succeed it")
        (tmp_path / "hold").unlink()
        after = run.ready(1)
        assert successor == [tmp_path / f"successor-{after.pid}"]
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.err
        assert list(tmp_path.glob("successor-*")) == successor
    assert "1 restart" in run.words[-1]


@pytest.mark.slow
def test_what_cannot_move_is_an_error(tmp_path: Path) -> None:
    with trains(tmp_path) as run:
        run.ready(0)
        assert re.search(r"no rank 7 runs on .*: 0, 1$", drain(tmp_path, 7).strip())
        check_ended(run, tmp_path)
    assert "does not run on this machine" in drain(tmp_path, 0)


@pytest.mark.parametrize("asked", [False, True])
def test_a_host_that_leaves_ends_successors_that_have_not_asked_the_ranks_to_leave(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
    successor = SimpleNamespace(pid=8, rank=1, successor=None, last_output=lambda: ("", ""))
    leaver = SimpleNamespace(pid=7, rank=1, successor=successor, settled=False)
    job, said = SimpleNamespace(state=JobState.RUNNING), list[str]()
    keys = SimpleNamespace(job=lambda: job, trains=lambda *_: not asked)
    resources: Any = SimpleNamespace(
        workers=[leaver, successor],
        coordinator=SimpleNamespace(keys=keys, host_id="h", leaves=True),
        console=SimpleNamespace(say=said.append),
    )
    moves = RankMoves(resources)
    moves.cancel()
    assert killed == ([] if asked else [(8, signal.SIGKILL)])
    dead: Any = successor
    assert moves.failed(dead, -9) is not asked  # once it has asked, its death is a fault
    assert leaver.successor is (successor if asked else None)


def test_a_host_whose_successors_fail_three_times_leaves_and_says_why() -> None:
    job, started = SimpleNamespace(state=JobState.RUNNING), list[int]()
    left, said = list[str](), list[str]()

    def trains(job: Any, host: str, ranks: range) -> bool:
        return (host, ranks) == ("leaver", range(5, 6))

    class Workers(list[Any]):
        takes_from: str | None = "leaver"
        replace: Any

    successor: Any = SimpleNamespace(
        pid=8, rank=5, local_rank=1, successor=None, last_output=lambda: ("Traceback\nOSError", "")
    )
    workers, keys = Workers(), SimpleNamespace(job=lambda: job, trains=trains)
    workers.replace = started.append
    coordinator = SimpleNamespace(keys=keys, host_id="h", leaves=False, leave=left.append)
    console = SimpleNamespace(say=said.append)
    resources: Any = SimpleNamespace(workers=workers, coordinator=coordinator, console=console)
    moves = RankMoves(resources)
    for _ in range(3):
        assert moves.failed(successor, 1)
    assert started == [1, 1]
    assert left == ["the successor of rank 5 (pid 8) exited with code 1: OSError"]
    assert said == left * 3
    workers.takes_from = None  # an ordinary death, which asks the store nothing: it waits for that
    del keys.job, keys.trains
    assert not moves.failed(successor, 1)

"""Workers that end before the wrapped function, and who has killed a worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.runs import WORKER, Run
from outlast.events.event import event_from_dict
from outlast.events.run_folders import runs_in
from outlast.events.types import LauncherEnded
from outlast.launch.workers.descendants import OomKills
from procs import NET_S

# A script that wraps a function, and is killed before it gets there.
WRAPPED = (
    WORKER + "\nif False:\n    from outlast.inprocess import Wrapper\n    Wrapper()(print)()\n"
)


def test_a_worker_killed_before_the_wrapped_function_is_replaced(tmp_path: Path) -> None:
    with Run(tmp_path, WRAPPED, "--nproc-per-node=2") as run:
        first = [run.ready(rank) for rank in range(2)]
        first[1].kill()
        second = run.ready(1)
        run.set_job("running")
        assert run.complete(first[0], second) == 0
    how = "was killed by SIGKILL from outside before it reached the wrapped function"
    assert f"rank 1 (pid {first[1].pid}) {how}: replacement 1 of 3" in run.words


def test_an_error_before_the_wrapped_function_ends_the_job(tmp_path: Path) -> None:
    with Run(tmp_path, WRAPPED, "--nproc-per-node=2", "--events-dir=events") as run:
        first = [run.ready(rank) for rank in range(2)]
        first[1].fail()
        assert run.wait() == 3
        pid = run.process.pid
    how = "exited with code 3 before it reached the wrapped function"
    assert f"rank 1 (pid {first[1].pid}) {how}: this ends the job" in run.words
    cause = run.words[-1].removeprefix("first cause: ")
    assert cause.endswith(how)
    (found,) = runs_in(tmp_path / "events")
    lines = (found.folder / f"agent-{pid}.jsonl").read_text().splitlines()
    (ended,) = [e for e in map(event_from_dict, map(json.loads, lines)) if type(e) is LauncherEnded]
    assert ended.cause == cause


def test_it_does_so_although_the_others_have_reached_it(tmp_path: Path) -> None:
    with Run(tmp_path, WRAPPED, "--nproc-per-node=2") as run:
        first = [run.ready(rank) for rank in range(2)]
        run.set_job("running", prefix="call/")
        first[1].fail()
        assert run.wait() == 3
    how = "exited with code 3 before it reached the wrapped function"
    assert f"rank 1 (pid {first[1].pid}) {how}: this ends the job" in run.words


@pytest.mark.parametrize("reached", [False, True])
def test_the_others_do_not_wait_for_a_rank_that_left_early(tmp_path: Path, reached: bool) -> None:
    with Run(tmp_path, WRAPPED, "--nproc-per-node=2") as run:
        first = [run.ready(rank) for rank in range(2)]
        store = run.store()
        if reached:
            store.put("call/claim/1", b"its token")
        first[1].succeed()
        run.set_job("running", prefix="call/")
        if not reached:
            assert set(store.wait_for("outlast/gone", NET_S).split()) == {b"[1]"}
            run.until_said("before it reached the wrapped function, where the other ranks wait")
            store.wait_for("call/ledger", NET_S)  # it counts as lost
        else:
            run.until_said("exited with code 0 within the wrapped function: a rank that ends so is")
        assert run.complete(first[0]) == 0
    assert ("before it reached" in run.err) is not reached


def test_a_kill_by_the_monitor_process_says_so(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2") as run:
        first = [run.ready(rank) for rank in range(2)]
        run.set_job("running", prefix="call/")
        why = b"no progress for 90 s (hard timeout)"
        store = run.store()
        store.put("call/claim/1", b"its token")
        store.put(f"call/killed/{first[1].pid}", why)
        store.read("call/killed")  # the put is served
        first[1].kill()
        second = run.ready(1)
        assert run.complete(first[0], second) == 0
    how = f"was killed by SIGKILL from its monitor process, after {why.decode()}"
    assert f"rank 1 (pid {first[1].pid}) {how}: replacement 1 of 3" in run.words


@pytest.mark.parametrize(
    ("line", "path", "before"),
    [
        ("0::/job", "job/memory.events", "low 0\noom 2\noom_kill 1\n"),
        ("4:memory:/job", "memory/job/memory.oom_control", "under_oom 0\noom_kill 1\n"),
        ("4:memory:/on/the/host", "memory/memory.oom_control", "oom_kill 1\n"),
    ],
)
def test_kills_of_the_out_of_memory_killer(
    tmp_path: Path, line: str, path: str, before: str
) -> None:
    own, counter = tmp_path / "cgroup", tmp_path / path
    own.write_text(f"9:name=systemd:/\n{line}\n")
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(before)
    kills = OomKills(own, tmp_path)
    assert not kills.any_new()
    counter.write_text(before.replace("oom_kill 1", "oom_kill 2"))
    assert kills.any_new()
    assert not kills.any_new()
    counter.unlink()
    assert not OomKills(own, tmp_path).any_new()

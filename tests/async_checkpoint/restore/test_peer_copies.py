"""The loss of a host: its ranks restore from the copies of their snapshots on another host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_checkpoint.restore.test_checkpointer_memory import have_ended
from async_checkpoint.staged_writer import Plan
from procs import Job

pytestmark = pytest.mark.slow

Ranks = Callable[..., Job]


def on(host: str, number: int) -> dict[str, str]:
    """The environment of a rank on a host."""
    return {"OUTLAST_HOST": host, "OUTLAST_HOST_ADDR": f"127.0.0.{number}"}


@contextmanager
def left_copies(ranks: Ranks, tmp_path: Path) -> Iterator[tuple[Job, list[list[int]]]]:
    """A job of two hosts with step 1 on storage and step 2 in memory; and the pidfds of keeper and
    writer of each rank.
    """
    plan = Plan(tmp_path / "plan")
    plan.gate("never")
    path = tmp_path / "c"
    with ranks("peer_copies", "leaves_copies", str(path), str(plan.folder)) as job:
        for rank in range(2):
            job.start(rank, on(f"host{rank}", rank + 1))
        helpers = []
        for rank in range(2):
            line = job.wait_for_line(rank, lambda line: line["event"] == "ready")
            helpers.append([line["keeper"], line["writer"]])
        yield job, helpers


def lose_host(job: Job, rank: int, helpers: list[int]) -> None:
    """Kills all processes of a host."""
    job.kill(rank)
    kill(helpers)


def kill(helpers: list[int]) -> None:
    pidfds = [os.pidfd_open(pid) for pid in helpers]
    for pidfd in pidfds:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    have_ended(pidfds)


def restored(ranks: Ranks, path: Path, hosts: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    """Starts the successors; returns what each rank restored: step, source, holder of its copy."""
    with ranks("peer_copies", "takes_copies", str(path)) as job:
        for rank in range(2):
            job.start(rank, hosts[rank])
        assert set(job.wait_all().values()) == {0}, job.errors(0) + job.errors(1)
        lines = [
            next(line for line in job.lines(rank) if line["event"] == "restored")
            for rank in range(2)
        ]
        for rank in range(2):
            again = [line for line in job.lines(rank) if line["event"] == "restored"][1]
            assert again["source"] == lines[0]["source"].replace("copies", "memory")
        return [(line["step"], line["source"], line["held_by"]) for line in lines]


def test_a_lost_host_is_restored_from_its_copies(ranks: Ranks, tmp_path: Path) -> None:
    """The survivor's rank takes its own snapshot, and its keeper's copies are handed over."""
    with left_copies(ranks, tmp_path) as (job, helpers):
        lose_host(job, 1, helpers[1])
        job.kill(0)
        assert restored(ranks, tmp_path / "c", [on("host0", 1), on("host2", 3)]) == [
            (2, "copies", ""),
            (2, "copies", "host0"),
        ]


def test_both_hosts_lost(ranks: Ranks, tmp_path: Path) -> None:
    with left_copies(ranks, tmp_path) as (job, helpers):
        lose_host(job, 0, helpers[0])
        lose_host(job, 1, helpers[1])
        assert restored(ranks, tmp_path / "c", [on("host2", 1), on("host3", 2)]) == [
            (1, "storage", ""),
            (1, "storage", ""),
        ]


def test_a_damaged_copy_is_passed_over(ranks: Ranks, tmp_path: Path) -> None:
    with left_copies(ranks, tmp_path) as (job, helpers):
        assert flip_a_byte(helpers[0][0]) == 1
        lose_host(job, 1, helpers[1])
        job.kill(0)
        assert restored(ranks, tmp_path / "c", [on("host0", 1), on("host2", 3)]) == [
            (1, "storage", ""),
            (1, "storage", ""),
        ]


def test_a_restart_in_place_with_a_replacement_on_another_host(
    ranks: Ranks, tmp_path: Path
) -> None:
    """After three faults, each with a copy in flight, which the restart calls off."""
    plan = Plan(tmp_path / "plan")
    plan.gate("never")
    path = tmp_path / "c"
    with ranks("peer_copies", "restarts_in_place", str(path), str(plan.folder), "3") as job:
        for rank in range(2):
            job.start(rank, on(f"host{rank}", rank + 1))
        ready = [
            job.wait_for_line(rank, lambda line: line["event"] == "ready") for rank in range(2)
        ]
        lose_host(job, 1, [ready[1]["keeper"], ready[1]["writer"]])
        job.start(1, on("host2", 3))
        assert set(job.wait_all().values()) == {0}, job.errors(0) + job.errors(1)
        steps = [line["step"] for line in job.lines(0) if line["event"] == "restored"]
        assert steps == [1, 2, 3, 5]
        for rank in range(2):
            lines = job.lines(rank)
            last = [line for line in lines if line["event"] == "restored"][-1]
            assert (last["step"], last["source"]) == (5, "copies")
            assert last["held_by"] == ("host0" if rank == 1 else "")
            assert lines[-1]["resources"] == ["outlast-copies", "outlast-keeper"]
            copied = [line["step"] for line in lines if line["event"] == "copied"]
            assert copied == [4, 5, 6]


def flip_a_byte(keeper: int) -> int:
    """Changes a byte of each copy that the keeper holds; returns their number."""
    seen = set()
    for descriptor in os.listdir(f"/proc/{keeper}/fd"):
        name = Path(f"/proc/{keeper}/fd/{descriptor}")
        if "outlast-snapshot" not in os.readlink(name) or name.stat().st_ino in seen:
            continue
        seen.add(name.stat().st_ino)  # its mapping has a descriptor too
        with name.open("r+b") as memory:
            memory.seek(100_000)
            byte = memory.read(1)
            memory.seek(100_000)
            memory.write(bytes([byte[0] ^ 1]))
    return len(seen)

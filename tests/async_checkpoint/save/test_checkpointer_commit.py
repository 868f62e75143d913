"""C1: a checkpoint is committed with all ranks' bytes durable, or it is not visible.

Each check also runs against broken code, where it must fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_checkpoint.checkpoints import NET, left_over, state_of, valid_steps
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer
from outlast.errors import CheckpointError
from procs import Job

Ranks = Callable[..., Job]
ROOM = "outlast.async_checkpoint"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    return Plan(tmp_path / "plan").use(monkeypatch)


def check_durable(path: Path, plan: Plan) -> None:
    """Everything is durable before the rename, and the rename before the save ends."""
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        assert valid_steps(path) == [1]
        checkpointer.save(1, state_of(2)).wait(NET)  # takes the place of the first
    notes = plan.notes()
    lost = [note["missing"] for note in notes if note["op"].startswith("durable")]
    assert lost == [[], [], [], []]


def test_all_is_durable_before_it_is_visible(tmp_path: Path, plan: Plan) -> None:
    check_durable(tmp_path / "c", plan)


NOT_DURABLE = {
    "a file's content": ("storage.local", "_Writer.finish", "os.fsync(self._fd)", "pass"),
    "a small file's": ("storage.local", "LocalStorage.put", "os.fsync(file.fileno())", "pass"),
    "the names of files": (
        "writer.main",
        "Writer.commit",
        "self.storage.sync(working)\n    replaced",
        "replaced",
    ),
    "the name of the folder": (
        "storage.local",
        "LocalStorage.publish",
        "self._sync_root()\n    return replaced",
        "return replaced",
    ),
}


@pytest.mark.parametrize("what", NOT_DURABLE)
def test_the_check_finds_what_is_not_durable(tmp_path: Path, plan: Plan, what: str) -> None:
    module, name, old, new = NOT_DURABLE[what]
    plan.mutate((f"{ROOM}.{module}", name, old, new))
    with pytest.raises(AssertionError):
        check_durable(tmp_path / "c", plan)


def check_all_ranks(ranks: Ranks, path: Path, plan: Plan, after: str = "saving") -> None:
    """Rank 1 is slow; nothing is visible until it has written its whole part."""
    plan.set({"op": "finish", "name": "__1_0.distcp", "do": "wait"})
    gate = plan.gate()
    with ranks("saves", "saves", str(path), str(plan.folder)) as job:
        job.start_all()
        if after == "saving":  # else the ranks may fail before rank 1 has anything to finish
            gate.arrived()
        for rank in range(2):
            job.wait_for_line(rank, lambda line: line["event"] == after)
        assert valid_steps(path) == []
        for rank in range(2):
            assert not any(line["event"] == "committed" for line in job.lines(rank))
        plan.set()
        gate.open()
        assert set(job.wait_all().values()) == {0}, job.errors(0) + job.errors(1)
    assert valid_steps(path) == [1]
    notes = plan.notes()
    manifest = next(i for i, note in enumerate(notes) if note["name"] == "manifest.json")
    ends = {note["name"]: i for i, note in enumerate(notes) if note["op"] == "finish"}
    assert {"__0_0.distcp", "__1_0.distcp"} <= ends.keys()
    assert max(ends.values()) < manifest


def test_nothing_is_visible_before_every_rank_has_written(
    ranks: Ranks, tmp_path: Path, plan: Plan
) -> None:
    check_all_ranks(ranks, tmp_path / "c", plan)


@pytest.mark.slow
def test_the_check_finds_a_rank_that_reports_too_early(
    ranks: Ranks, tmp_path: Path, plan: Plan
) -> None:
    plan.answer_early()
    with pytest.raises((AssertionError, CheckpointError), match=r"assert|damaged|lacks __[01]_"):
        check_all_ranks(ranks, tmp_path / "c", plan, after="committed")


def check_one_fails(ranks: Ranks, path: Path, plan: Plan, *mutation: str) -> None:
    """An error of one rank's writer fails the save on all ranks, and leaves no files."""
    plan.set({"op": "write_at", "name": "__1_0.distcp", "do": "ENOSPC"})
    with ranks("saves", "one_fails", str(path), str(plan.folder), *mutation) as job:
        job.start_all()
        codes = job.wait_all()
        messages = [
            [line["message"] for line in job.lines(rank) if line["event"] == "raised"]
            for rank in range(2)
        ]
        assert set(codes.values()) == {0}, job.errors(0) + job.errors(1)
    for (message,) in messages:
        assert re.search("save of step 1 failed on rank 1 on .*: OSError: .*No space left", message)
        assert "\n" not in message  # the traceback of the writer is only at DEBUG
    assert valid_steps(path) == [2]
    assert left_over(path) == []


def test_one_ranks_failure_is_an_error_on_all(ranks: Ranks, tmp_path: Path, plan: Plan) -> None:
    check_one_fails(ranks, tmp_path / "c", plan)


def test_the_check_finds_a_verdict_that_is_ignored(
    ranks: Ranks, tmp_path: Path, plan: Plan
) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_one_fails(ranks, tmp_path / "c", plan, "deaf")


def test_saves_of_several_ranks_are_committed_in_order(
    ranks: Ranks, tmp_path: Path, plan: Plan
) -> None:
    with ranks("saves", "many", str(tmp_path / "c"), str(plan.folder), nprocs=3) as job:
        job.start_all()
        assert set(job.wait_all().values()) == {0}, job.errors(0)
    published: list[Any] = [n["folder"] for n in plan.notes() if n["op"] == "publish"]
    assert [int(folder.split("-")[2]) for folder in published] == [1, 2, 3, 4, 5]
    assert valid_steps(tmp_path / "c") == [1, 2, 3, 4, 5]

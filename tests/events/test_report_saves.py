"""The part of a report about checkpoints."""

from __future__ import annotations

import io

from rich.console import Console

from outlast.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointPassedOver,
    CheckpointRestored,
    CopyCompleted,
    CopySkipped,
    Event,
)
from outlast.events.report import build, render_report
from outlast.events.report.sentences import describe


def committed(step: int, *, rank: int, blocked: float, seconds: float, at: float) -> Event:
    return CheckpointCommitted(
        rank=rank,
        host="a",
        time=at,
        step=step,
        size_bytes=step * 1_000_000,
        blocked_seconds=blocked,
        seconds=seconds,
    )


def test_a_run_without_checkpoints_has_no_saves() -> None:
    assert build([]).saves is None


def test_a_log_of_checkpoints_alone_says_so() -> None:
    events = [committed(10, rank=0, blocked=0.1, seconds=0.2, at=1.0)]
    report = build(events)
    assert (report.source, report.goodput, report.restarts) == ("checkpoints", None, ())
    console = Console(file=io.StringIO(), width=80, color_system=None)
    render_report(report, console)
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert text.startswith("The logs have only events of checkpoints.")
    assert "rank" not in text.partition("1 checkpoint of 10.0 MB")[0]


def test_each_save_counts_once_for_all_ranks() -> None:
    events = [
        committed(step, rank=rank, blocked=blocked, seconds=seconds, at=float(step))
        for step, blocked, seconds in ((10, 0.002, 0.5), (20, 0.004, 0.7), (30, 0.04, 0.6))
        for rank in (0, 1)
    ]
    saves = build(events).saves
    assert saves is not None
    assert saves.committed == 3
    assert saves.size_bytes == 30_000_000
    assert (saves.blocked_median, saves.blocked_worst) == (0.004, 0.04)
    assert saves.durable_median == 0.6
    said, newest = describe("saves", saves)
    assert newest == "The newest checkpoint is that of step 30."
    assert "3 checkpoints of 30.0 MB" in said
    assert "4.0 ms" in said
    assert "600.0 ms" in said


def test_failed_damaged_and_restored_checkpoints_are_named_by_step() -> None:
    events: list[Event] = [
        CheckpointFailed(rank=0, host="a", time=1.0, step=7, cause="the disk is full"),
        CheckpointPassedOver(rank=0, host="a", time=2.0, step=6, source="storage", cause="damaged"),
        CheckpointRestored(rank=0, host="a", time=3.0, step=5, source="memory"),
    ]
    saves = build(events).saves
    assert saves is not None
    assert saves.failed == ((7, "the disk is full"),)
    text = " ".join(describe("saves", saves))
    for part in ("Failed on all ranks, not committed: step 7", "step 6", "step 5 from memory"):
        assert part in text


def test_copies_are_named_with_their_ranks_and_hosts() -> None:
    def restored(rank: int, held_by: str = "") -> Event:
        return CheckpointRestored(
            rank=rank, host="a", time=3.0, step=5, source="copies", held_by=held_by
        )

    events: list[Event] = [
        CopyCompleted(rank=0, host="a", time=1.0, step=5, own_bytes=10_000_000, seconds=0.5),
        CopySkipped(rank=0, host="a", time=2.0, step=6, cause="rank 3 on b: too slow"),
        restored(0),
        restored(1),
        restored(2, "c"),
        restored(3, "c"),
    ]
    saves = build(events).saves
    assert saves is not None
    text = " ".join(describe("saves", saves))
    assert "step 5 from memory (ranks 2, 3 from their copies on host c)" in text
    assert "1 save copied to other hosts' memory: 10.0 MB from rank 0 in 500.0 ms" in text
    assert "step 6, rank 3 on b: too slow" in text


def test_one_save_has_no_median() -> None:
    saves = build([committed(10, rank=0, blocked=0.1, seconds=0.2, at=1.0)]).saves
    assert saves is not None
    assert describe("saves", saves)[0] == (
        "1 checkpoint of 10.0 MB committed: it blocked training for 100.0 ms and was durable after "
        "200.0 ms."
    )

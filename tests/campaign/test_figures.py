"""Which restart a fault has caused, and which checkpoints were believed, from events alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from outlast.campaign.figures import Stage, believed_partial, fired_faults, unexplained
from outlast.campaign.plan import RoundPlan
from outlast.campaign.results import CampaignResult, Fired, RoundResult, write_markdown
from outlast.chaos import Kind, Phase, PlannedFault
from outlast.events.event import Event
from outlast.events.report import build
from outlast.events.types import (
    Assigned,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointRestored,
    Entered,
    Fault,
    Seen,
)

PLAN = RoundPlan(
    seed=1,
    number=1,
    ranks=2,
    steps=9,
    faults=(
        PlannedFault(rank=1, kind=Kind.HANG, step=3),
        PlannedFault(rank=0, kind=Kind.SLOW_DISK, step=3, phase=Phase.WRITING),
    ),
)


def stage(*events: Event) -> Stage:
    return Stage(events, build(events), min(event.time for event in events))


def a_restart() -> Stage:
    """Rank 1, process 11, hangs; it is seen at 24.0 s and entered again at 24.5 s."""
    common = [{"rank": rank, "member": rank, "pid": 10 + rank, "host": "h"} for rank in range(2)]
    events: list[Event] = []
    for one in common:
        events.append(Assigned(**one, iteration=0, time=10.0, world_size=2, active_world_size=2))
        events.append(Entered(**one, iteration=0, time=10.1))
    hang = Fault(**common[1], iteration=0, time=24.0, interruption="SOFT_TIMEOUT", idle=4.0)
    events.append(hang)
    for one in common:
        events.append(Seen(**one, iteration=0, time=24.1, reason="a hang"))
        events.append(Assigned(**one, iteration=1, time=24.3, world_size=2, active_world_size=2))
        events.append(Entered(**one, iteration=1, time=24.5))
    return stage(*events)


def test_a_fault_has_the_times_of_the_restart_that_names_its_process(tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    fired.mkdir(mode=0o700)
    for key, kind, pid, time in (
        ("planned-0", "hang", 11, 20.0),
        ("planned-1", "slow_disk", 10, 20.5),
    ):
        record = {"key": key, "kind": kind, "rank": pid - 10, "step": 3, "pid": pid, "time": time}
        (fired / key).write_text(json.dumps(record))
    hang, slow = fired_faults(PLAN, fired, [a_restart()])
    assert (hang.kind, hang.phase, hang.rank) == ("hang", "step", 1)
    assert hang.seen == pytest.approx(4.1)
    assert hang.back == pytest.approx(4.5)
    assert slow == Fired(kind="slow_disk", phase="writing", rank=0, step=3)
    assert hang.named
    assert unexplained(fired, [a_restart()]) == []


def test_a_restart_without_a_named_process_is_that_of_the_last_fault(tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    fired.mkdir(mode=0o700)
    plan = structs.replace(PLAN, faults=(PlannedFault(rank=0, kind=Kind.KILL_MONITOR),) * 2)
    for key, time in (("planned-0", 23.0), ("planned-1", 23.9)):
        record = {"key": key, "kind": "kill_monitor", "rank": 0, "step": 3, "pid": 10, "time": time}
        (fired / key).write_text(json.dumps(record))
    earlier, last = fired_faults(plan, fired, [a_restart()])
    assert earlier.back is None
    assert last.back == pytest.approx(0.6)
    assert last.named is None  # the other one was not over
    (fired / "planned-0").unlink()
    assert fired_faults(plan, fired, [a_restart()])[0].named is False
    (fired / "planned-1").unlink()
    assert unexplained(fired, [a_restart()]) == ["rank 1: "]


def restored(*before: Event) -> list[str]:
    after = CheckpointRestored(step=5, source="storage", time=9.0)
    return believed_partial([stage(*before, after)])


def test_a_checkpoint_whose_save_failed_must_not_be_restored() -> None:
    failed = CheckpointFailed(step=5, cause="the disk is full", time=1.0)
    assert restored(failed) == ["step 5 was restored from storage; its save had failed"]
    assert not restored(failed, CheckpointCommitted(step=5, time=2.0))
    assert not restored(CheckpointFailed(step=4, cause="the disk is full", time=1.0))


def test_a_checkpoint_that_may_have_been_committed_may_be_restored() -> None:
    cause = "it is not known whether the save of step 5 was committed: rank 0 is gone"
    assert not restored(CheckpointFailed(step=5, cause=cause, time=1.0))
    assert not believed_partial([stage(CheckpointRestored(step=5, source="storage", time=1.0))])


def test_the_table_has_a_row_for_each_kind_and_the_totals(tmp_path: Path) -> None:
    fired = [
        Fired(kind="hang_gil", seen=4.0, back=8.0, redone=3, named=True),
        Fired(kind="hang_gil", seen=5.0, back=9.5, redone=2, named=False),
        Fired(kind="slow_disk"),
    ]
    one = RoundResult(plan=PLAN, fired=fired, wall_seconds=20.0, productive_seconds=5.0)
    one.problems["orphans"].append("a process")
    one.unexplained.append("rank 1: no progress")
    result = CampaignResult(seed=1, ranks=2, rounds=(one,), seconds=60.0)
    text = result.markdown()
    assert "| hang gil | 2 | 1 of 2 | 5.00 / 5.00 | 9.50 / 9.50 | 5 |" in text
    assert "| slow disk | 1 | - | - | - | - |" in text
    assert "| all | 3 | 1 of 2 | 5.00 / 5.00 | 9.50 / 9.50 | 5 |" in text
    assert "| time | 1.0 min (20.0 s each) |" in text
    assert "| goodput | 25% |" in text
    assert "| orphans | 1 |" in text
    assert "| restarts without a fault | 1 |" in text

    page = tmp_path / "page.md"
    page.write_text("A page without markers.\n")
    write_markdown(result, page)
    assert page.read_text() == f"A page without markers.\n\n{text}"

"""What a training may consist of: after an exception and a kill, each ends with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Run, check_same, fault, later, run
from procs import Job

Ranks = Callable[..., Job]
pytestmark = pytest.mark.slow
LIVE, REPLICA = "live", "replica"


@pytest.mark.parametrize("kind", ["accumulation", "scaler", "consistent", "stream", "compiled"])
def test_a_training_of_any_kind_continues_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """Two faults in a row: an exception, between two micro-batches if there are several, and a kill
    in one of the next steps.
    """
    reference = run(ranks, tmp_path / "reference", script="live_kinds", kind=kind)
    micro = 1 if kind in ("accumulation", "consistent") else 0
    faults = [
        *later(1, 6, f"forward 7 {micro}", "raise", iteration=0),
        *later(1, 8, f"forward 9 {micro}", "SIGKILL", iteration=1),
    ]
    faulty = run(ranks, tmp_path / "faulty", *faults, script="live_kinds", kind=kind)
    assert faulty.restored(1) == {0: (6, LIVE), 1: (6, LIVE)}, faulty.errors
    assert faulty.restored(2) == {0: (8, LIVE), 1: (8, REPLICA)}, faulty.errors
    check_same(faulty, reference)


def test_with_a_loader_of_its_own_a_rank_killed_after_its_gradients_were_sent_costs_no_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    """What it has in its loader after the step is known before that: the others have completed it,
    and its replacement goes on with the batch after it.
    """
    reference = run(ranks, tmp_path / "reference", script="live_kinds", kind="loader")
    faults = [*later(1, 9, "computed 9", "SIGKILL", iteration=0)]
    faulty = run(ranks, tmp_path / "faulty", *faults, script="live_kinds", kind="loader")
    assert faulty.restored() == {0: (9, LIVE), 1: (9, REPLICA)}, faulty.errors
    check_same(faulty, reference, not_told=(1, 9))


@pytest.mark.parametrize("at", ["backward", "computed", "stepped"])
def test_what_a_loader_is_told_after_the_backward_pass_is_part_of_the_step(
    ranks: Ranks, tmp_path: Path, at: str
) -> None:
    """A rank that is killed before it was told has noted another state than that of the step."""
    reference = run(ranks, tmp_path / "reference", script="live_kinds", kind="told")
    faults = [*later(1, 9, f"{at} 9", "SIGKILL", iteration=0)]
    faulty = run(ranks, tmp_path / "faulty", *faults, script="live_kinds", kind="told")
    if at == "stepped":
        assert faulty.restored() == {0: (9, LIVE), 1: (9, REPLICA)}, faulty.errors
    else:
        assert {step for step, _ in faulty.restored().values()} == {8}, faulty.errors
    check_same(faulty, reference)


def test_a_step_with_a_closure_begins_with_the_first_write(ranks: Ranks, tmp_path: Path) -> None:
    """LBFGS evaluates its closure, writes, and evaluates it again: the second is in its step."""
    reference = run(ranks, tmp_path / "reference", script="live_kinds", kind="closure")
    faults = [
        *later(1, 6, "evaluation 7 1", "raise", iteration=0),
        fault(0, "evaluation 10 2", "mark second, stay", iteration=1),
        fault(1, "evaluation 10 2", "await second, raise another", iteration=1),
    ]
    faulty = run(ranks, tmp_path / "faulty", *faults, script="live_kinds", kind="closure")
    assert faulty.restored(1) == {0: (6, LIVE), 1: (6, LIVE)}, faulty.errors
    assert {step for step, _ in faulty.restored(2).values()} == {8}, faulty.errors
    why = "ranks 0, 1: the optimizer had begun step 10, which was not completed"
    assert f"the state of the surviving ranks is not used: {why}" in faulty.errors
    check_same(faulty, reference)


def test_a_smaller_job_continues_from_the_step_of_the_survivors(
    ranks: Ranks, tmp_path: Path
) -> None:
    faults = later(1, 6, "forward 7 0", "SIGKILL", nprocs=3)
    faulty = run(
        ranks, tmp_path / "c", *faults, nprocs=3, script="live_kinds", kind="shrink", replace=False
    )
    found = faulty.restored()
    assert found == {0: (6, LIVE), 2: (6, LIVE)}, faulty.errors
    assert {line["size"] for line in faulty.events("restored") if line["iteration"] == 1} == {2}
    assert len(set(faulty.ended().values())) == 1
    assert all(faulty.times(rank, step) == 1 for rank in (0, 2) for step in range(1, 13))


def test_a_fault_of_all_ranks_between_optimizer_and_job_costs_the_steps_since_the_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The optimizers are at step 7, but nothing says what else belongs to that step."""
    reference = run(ranks, tmp_path / "reference", script="live_kinds")
    faults = [
        fault(0, "stepped 7", "mark stepped, stay"),
        fault(1, "stepped 7", "await stepped, raise"),
    ]
    faulty = run(ranks, tmp_path / "faulty", *faults, script="live_kinds")
    assert {step for step, _ in faulty.restored().values()} == {4}
    check_same(faulty, reference)


def test_an_exception_costs_no_step_with_fsdp(ranks: Ranks, tmp_path: Path) -> None:
    """But a kill does: no replica has the part of that rank."""
    reference = run(ranks, tmp_path / "r", kind="fsdp")
    faulty = run(ranks, tmp_path / "c", *later(1, 6, "forward 7", "raise"), kind="fsdp")
    assert faulty.restored() == {0: (6, "live"), 1: (6, "live")}
    check_same(faulty, reference)
    killed = run(ranks, tmp_path / "k", *later(1, 6, "forward 7", "SIGKILL"), kind="fsdp")
    assert {step for step, _ in killed.restored().values()} == {4}
    check_same(killed, reference)


def test_a_killed_rank_gets_its_part_from_a_replica_with_hsdp(ranks: Ranks, tmp_path: Path) -> None:
    reference = run(ranks, tmp_path / "r", kind="hsdp", nprocs=4)
    faults = later(1, 6, "forward 7", "SIGKILL", nprocs=4)
    faulty = run(ranks, tmp_path / "c", *faults, kind="hsdp", nprocs=4)
    assert faulty.restored() == {
        **dict.fromkeys((0, 2, 3), (6, "live")),
        1: (6, "replica"),
    }
    check_same(faulty, reference)


@pytest.mark.fsdp2
@pytest.mark.parametrize("again", [(), ("raise",), ("SIGKILL",)], ids=str)
def test_fewer_ranks_continue_from_the_shards_of_all_with_hsdp(
    ranks: Ranks, tmp_path: Path, again: tuple[str, ...]
) -> None:
    """Rank 3 is lost, whose shards rank 1 has, too: three ranks divide them anew. In the midst of
    that, there is one more fault: rank 2 has the same shards as rank 0.
    """
    faults = later(3, 6, "forward 7", "SIGKILL", nprocs=4)
    more = [fault(2, "reshard", each.replace("raise", "raise another")) for each in again]
    plan: dict[str, Any] = {"kind": "hsdp", "await": False, "job": {"min_ranks": 2, "linger": 0}}
    faulty = run(ranks, tmp_path / "c", *faults, *more, nprocs=4, replace=False, **plan)
    left = {0, 1, 2} if again != ("SIGKILL",) else {0, 1}
    last = max(line["iteration"] for line in faulty.events("restored"))
    assert last == 1 + len(again)
    assert faulty.restored(last) == dict.fromkeys(left, (6, "memory")), faulty.errors
    assert "the state of the surviving ranks is not used" not in faulty.errors
    made = [(rank, step) for rank in left for step in range(1, 13)]
    assert all(faulty.times(rank, step) == 1 for rank, step in made), faulty.errors
    assert len(set(faulty.ended().values())) == 1


@pytest.mark.fsdp2
def test_shards_that_cannot_be_saved_cost_the_steps_since_the_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    faults = [*later(3, 6, "forward 7", "SIGKILL", nprocs=4), fault(2, "reshard", "refuse")]
    plan: dict[str, Any] = {"kind": "hsdp", "await": False, "job": {"min_ranks": 2, "linger": 0}}
    faulty = run(ranks, tmp_path / "c", *faults, nprocs=4, replace=False, **plan)
    assert faulty.restored() == dict.fromkeys(range(3), (4, "storage")), faulty.errors
    assert "cannot be resharded: " in faulty.errors
    assert "a planned refusal" in faulty.errors
    assert "the state of the surviving ranks is not used: step 6 lacks" in faulty.errors


def ends(found: Run) -> dict[tuple[int, int], set[str]]:
    """What each rank has drawn at the end of each epoch, and its learning rate then."""
    by_rank: dict[tuple[int, int], set[str]] = {}
    for line in found.events("epoch end"):
        said = f"{line['drawn']} {line['rate']}"
        by_rank.setdefault((line["of"], line["epoch"]), set()).add(said)
    return by_rank


@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
@pytest.mark.parametrize("at", ["end 0", "forward 7", "end 1"])
def test_the_end_of_an_epoch_is_repeated(ranks: Ranks, tmp_path: Path, at: str, do: str) -> None:
    """The survivors' state is that of its last step."""
    plan: dict[str, Any] = {"every": None}
    reference = run(ranks, tmp_path / "reference", **plan)
    epoch = 1 if at == "end 1" else 0
    # Otherwise rank 0 may be interrupted in the last step, and receive the state after it.
    faults = later(1, 6 * (epoch + 1), at, do)
    faulty = run(ranks, tmp_path / "faulty", *faults, **plan)
    assert faulty.losses() == reference.losses(), faulty.errors
    # Made after the restore, DDP gives all ranks the batch-norm statistics of rank 0.
    assert faulty.ended()[0] == reference.ended()[0], faulty.errors
    assert ends(faulty) == ends(reference)
    again = [line for line in faulty.events("epoch end") if line["epoch"] == epoch]
    assert len(again) > 2, "both ranks, and at least one of them again"
    assert {step for step, _ in faulty.restored().values()} == {6 * (epoch + 1)}

"""A lost host costs no step: what its ranks alone had is mirrored on another host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Ranks, Run, check_same, fault, later, ranks_of, run

LIVE, REPLICA = "live", "replica"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> Run:
    folder = tmp_path_factory.mktemp("reference")
    script = Path(__file__).parents[1] / "scripts" / "live.py"
    return run(ranks_of(folder, script, zygote), folder / "checkpoints")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_between_two_steps_costs_no_step(
    ranks: Ranks, tmp_path: Path, reference: Run, lost: int
) -> None:
    faulty = run(ranks, tmp_path / "c", *later(lost, 6, "forward 7", "SIGKILL"), hosts=True)
    assert faulty.restored() == {lost: (6, REPLICA), 1 - lost: (6, LIVE)}, faulty.errors
    check_same(faulty, reference)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["torn", "stepped"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_after_the_gradients_were_exchanged_costs_no_step(
    ranks: Ranks, tmp_path: Path, reference: Run, lost: int, at: str
) -> None:
    """What was noted before the exchange has arrived before it."""
    faulty = run(
        ranks,
        tmp_path / "c",
        fault(1 - lost, "done 7", "mark done"),
        fault(lost, f"{at} 7", "await done, SIGKILL"),
        hosts=True,
    )
    assert faulty.restored() == {lost: (7, REPLICA), 1 - lost: (7, LIVE)}, faulty.errors
    check_same(faulty, reference, None if at == "stepped" else (lost, 7))


@pytest.mark.slow
def test_a_holder_that_is_killed_too_leaves_its_mirror_to_its_replacement(
    ranks: Ranks, tmp_path: Path
) -> None:
    reference = run(ranks, tmp_path / "reference", nprocs=3)
    faults = [
        fault(0, "done 6", "mark done"),
        fault(1, "forward 7", "mark one, await two, SIGKILL"),
        fault(2, "forward 7", "await done, await one, mark two, SIGKILL", stays=True),
    ]
    faulty = run(ranks, tmp_path / "c", *faults, nprocs=3, hosts=True)
    assert {step for step, _ in faulty.restored().values()} <= {6}, faulty.errors
    last = max(line["iteration"] for line in faulty.events("restored"))
    assert {step for step, _ in faulty.restored(last).values()} == {6}, faulty.errors
    check_same(faulty, reference)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["consistent", "stream"])
def test_a_smaller_job_has_the_states_of_the_lost_ranks(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """As from a checkpoint: the parts of a `ConsistentDDP` have the bits of any number of ranks,
    and no item of a stream comes twice.
    """
    plan: dict[str, Any] = {"script": "live_kinds", "kind": kind, "nprocs": 3, "steps": 8}
    faults = later(1, 6, "forward 7 0", "SIGKILL", nprocs=3)
    faulty = run(ranks, tmp_path / "c", *faults, replace=False, shrinks=True, hosts=True, **plan)
    assert faulty.restored() == {0: (6, LIVE), 2: (6, LIVE)}, faulty.errors
    assert len(set(faulty.ended().values())) == 1
    trained = faulty.events("trained")
    if kind == "stream":
        items = [item for line in trained for item in line["items"]]
        assert len(items) == (6 * 3 + 2 * 2) * 4
        assert len(set(items)) == len(items)
    else:
        reference = run(ranks, tmp_path / "reference", **plan)
        assert set(faulty.ended().values()) == set(reference.ended().values())


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [False, True])
@pytest.mark.parametrize("kind", ["consistent", "stream"])
def test_states_of_each_rank_are_noted_before_the_exchange(
    ranks: Ranks, tmp_path: Path, kind: str, hosts: bool
) -> None:
    """Rank 0 completes the step, and rank 1 is lost before the optimizer has begun it."""
    plan: dict[str, Any] = {"script": "live_kinds", "kind": kind, "hosts": hosts}
    reference = run(ranks, tmp_path / "reference", **plan)
    faults = [fault(0, "done 7", "mark done"), fault(1, "computed 7", "await done, SIGKILL")]
    faulty = run(ranks, tmp_path / "c", *faults, **plan)
    assert faulty.restored() == {0: (7, LIVE), 1: (7, REPLICA)}, faulty.errors
    check_same(faulty, reference, (1, 7))


@pytest.mark.slow
def test_a_lost_host_with_a_replica_of_its_shards_costs_no_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    reference = run(ranks, tmp_path / "reference", kind="hsdp", nprocs=4)
    faults = later(1, 6, "forward 7", "SIGKILL", nprocs=4)
    faulty = run(ranks, tmp_path / "c", *faults, kind="hsdp", nprocs=4, hosts=True)
    others = dict.fromkeys((0, 2, 3), (6, LIVE))
    assert faulty.restored() == {**others, 1: (6, REPLICA)}, faulty.errors
    check_same(faulty, reference)

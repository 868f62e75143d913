"""A GAN with a teacher and an average of the generator: after a fault, all of them continue from
the newest step that a rank has, bit by bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Ranks, Run, check_same, fault, later, ranks_of, run

SLOW = pytest.mark.slow
LIVE, REPLICA = "live", "replica"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> Run:
    folder = tmp_path_factory.mktemp("reference")
    script = Path(__file__).parents[1] / "scripts" / "gan.py"
    return run(ranks_of(folder, script, zygote), folder / "checkpoints", script="gan")


def both(at: str, do: str) -> list[dict[str, Any]]:
    """A fault of rank 1 while rank 0 is at the same point."""
    return [fault(0, at, "mark there, stay"), fault(1, at, f"await there, {do}")]


def from_checkpoint(found: Run) -> None:
    """All ranks have loaded that of step 4."""
    assert {step for step, _ in found.restored().values()} == {4}, found.errors
    assert not {source for _, source in found.restored().values()} & {LIVE, REPLICA}


@pytest.mark.slow
@pytest.mark.parametrize("do", ["raise", pytest.param("SIGKILL", marks=SLOW)])
def test_a_fault_before_the_first_optimizer_costs_no_step(
    ranks: Ranks, tmp_path: Path, reference: Run, do: str
) -> None:
    """The generator has left gradients in the discriminator; zero_grad has discarded them."""
    both_have = fault(0, "d zeroed 7", "mark zeroed"), fault(1, "d zeroed 7", f"await zeroed, {do}")
    faulty = run(ranks, tmp_path / "c", *both_have, script="gan")
    assert faulty.restored() == {0: (6, LIVE), 1: (6, LIVE if do == "raise" else REPLICA)}
    check_same(faulty, reference)


@SLOW
@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
def test_new_gradients_take_the_place_of_those_discarded(
    ranks: Ranks, tmp_path: Path, reference: Run, do: str
) -> None:
    faulty = run(ranks, tmp_path / "c", *both("d computed 7", do), script="gan")
    assert faulty.restored() == {0: (6, LIVE), 1: (6, LIVE if do == "raise" else REPLICA)}
    check_same(faulty, reference)


@SLOW
@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
def test_one_rank_that_has_discarded_its_gradients_is_enough(
    ranks: Ranks, tmp_path: Path, reference: Run, do: str
) -> None:
    """Rank 0 waits in the backward pass; rank 1 still has the gradients that were left over."""
    faulty = run(
        ranks,
        tmp_path / "c",
        fault(0, "d zeroed 7", "mark zeroed"),
        fault(1, "loaded 7", f"await zeroed, {do}"),
        script="gan",
    )
    assert faulty.restored() == {0: (6, LIVE), 1: (6, REPLICA)}
    check_same(faulty, reference)


@SLOW
@pytest.mark.parametrize("kind", ["ddp", "cleared"])
def test_gradients_that_no_rank_has_discarded_may_be_needed(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    reference = run(ranks, tmp_path / "r", script="gan", kind=kind)
    faulty = run(ranks, tmp_path / "c", *both("loaded 7", "raise"), script="gan", kind=kind)
    if kind == "cleared":
        assert faulty.restored() == {0: (6, LIVE), 1: (6, LIVE)}
    else:
        from_checkpoint(faulty)
        assert "the gradient of d.0.weight was left over from step 6" in faulty.errors
        assert "call zero_grad() before job.step()" in faulty.errors
    check_same(faulty, reference)


@pytest.mark.parametrize("do", ["raise", pytest.param("SIGKILL", marks=SLOW)])
@pytest.mark.parametrize(
    "at",
    [
        "d stepped",
        *(pytest.param(at, marks=SLOW) for at in ("g computed", "g stepped", "averaged")),
    ],
)
def test_a_fault_of_all_ranks_between_the_optimizers_costs_the_steps_since_the_checkpoint(
    ranks: Ranks, tmp_path: Path, reference: Run, at: str, do: str
) -> None:
    faulty = run(ranks, tmp_path / "c", *both(f"{at} 7", do), script="gan")
    from_checkpoint(faulty)
    assert "the optimizer had begun step 7, which was not completed" in faulty.errors
    check_same(faulty, reference)


@pytest.mark.slow
@pytest.mark.parametrize("do", ["raise", pytest.param("SIGKILL", marks=SLOW)])
@pytest.mark.parametrize(
    "at", ["g computed", *(pytest.param(a, marks=SLOW) for a in ("g stepped", "averaged"))]
)
def test_the_completed_step_is_sent_to_a_rank_that_has_not_completed_it(
    ranks: Ranks, tmp_path: Path, reference: Run, at: str, do: str
) -> None:
    """What rank 1 alone has is known from the last of its backward passes."""
    faulty = run(
        ranks,
        tmp_path / "c",
        fault(0, "d zeroed 8", "mark zeroed"),
        fault(1, f"{at} 7", f"await zeroed, {do}"),
        script="gan",
    )
    assert faulty.restored() == {0: (7, LIVE), 1: (7, REPLICA)}, faulty.errors
    check_same(faulty, reference, None if at == "averaged" else (1, 7))


@SLOW
def test_the_pass_of_each_optimizer_notes_what_a_rank_alone_has(
    ranks: Ranks, tmp_path: Path
) -> None:
    """In that of the generator, the discriminator gets no gradient."""
    plan: dict[str, Any] = {"script": "gan", "kind": "accumulate"}
    reference = run(ranks, tmp_path / "r", **plan)
    faults = fault(0, "d zeroed 7", "mark zeroed"), fault(1, "averaged 6", "await zeroed, SIGKILL")
    faulty = run(ranks, tmp_path / "c", *faults, **plan)
    assert faulty.restored() == {0: (6, LIVE), 1: (6, REPLICA)}, faulty.errors
    check_same(faulty, reference)


@SLOW
def test_a_write_to_the_average_between_two_steps_is_noticed(
    ranks: Ranks, tmp_path: Path, reference: Run
) -> None:
    faulty = run(ranks, tmp_path / "c", *later(0, 6, "d zeroed 7", "write, raise"), script="gan")
    assert faulty.restored() == {0: (6, REPLICA), 1: (6, LIVE)}
    check_same(faulty, reference)


@SLOW
@pytest.mark.parametrize("step", [7, 8])
def test_gradients_that_are_accumulated_over_two_steps_are_not_lost(
    ranks: Ranks, tmp_path: Path, step: int
) -> None:
    """The optimizer of the generator steps each time, that of the discriminator every second."""
    plan: dict[str, Any] = {"script": "gan", "kind": "accumulate"}
    reference = run(ranks, tmp_path / "r", **plan)
    faulty = run(ranks, tmp_path / "c", *both(f"d computed {step}", "raise"), **plan)
    if step == 7:
        assert faulty.restored() == {0: (6, LIVE), 1: (6, LIVE)}
    else:
        from_checkpoint(faulty)
        assert "the gradient of d.0.weight was left over from step 7" in faulty.errors
    check_same(faulty, reference)


@SLOW
def test_sharded_models_continue_from_their_own_state(ranks: Ranks, tmp_path: Path) -> None:
    reference = run(ranks, tmp_path / "r", script="gan", kind="fsdp")
    faulty = run(ranks, tmp_path / "c", *both("d zeroed 7", "raise"), script="gan", kind="fsdp")
    assert faulty.restored() == {0: (6, LIVE), 1: (6, LIVE)}, faulty.errors
    check_same(faulty, reference)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=SLOW)])
@pytest.mark.parametrize("size", [1, pytest.param(3, marks=SLOW)])
def test_a_checkpoint_of_two_ranks_is_loaded_by_more_or_less(
    ranks: Ranks, tmp_path: Path, size: int, kind: str
) -> None:
    plan: dict[str, Any] = {"script": "gan", "kind": kind}
    saved = run(ranks, tmp_path / "c", **plan, epochs=1)
    loaded = run(ranks, tmp_path / "c", **plan, nprocs=size)
    assert {line["step"] for line in loaded.events("restored")} == {6}
    assert {line["state"] for line in loaded.events("restored")} == set(saved.ended().values())
    assert len(loaded.ended()) == size
    assert len(set(loaded.ended().values())) == 1

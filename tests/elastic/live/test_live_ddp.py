"""After a fault, DDP ranks continue from the newest step that a replica has, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Ranks, Run, check_same, fault, later, ranks_of, run

SLOW = pytest.mark.slow
LIVE, REPLICA = "live", "replica"
KEPT = pytest.mark.parametrize("kept", [False, pytest.param(True, marks=SLOW)])
"""Whether a process's model and optimizer outlive its iterations."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> Run:
    folder = tmp_path_factory.mktemp("reference")
    script = Path(__file__).parents[1] / "scripts" / "live.py"
    return run(ranks_of(folder, script, zygote), folder / "checkpoints")


@KEPT
def test_an_exception_between_two_steps_costs_no_step(
    ranks: Ranks, tmp_path: Path, reference: Run, kept: bool
) -> None:
    faulty = run(ranks, tmp_path / "c", *later(1, 6, "forward 7", "raise"), kept=kept)
    assert faulty.restored() == {0: (6, LIVE), 1: (6, LIVE)}
    assert all(faulty.times(rank, step) == 1 for rank in range(2) for step in range(1, 13))
    check_same(faulty, reference)


@pytest.mark.parametrize("at", ["forward", pytest.param("done", marks=SLOW)])
def test_a_killed_rank_gets_the_state_of_a_replica(
    ranks: Ranks, tmp_path: Path, reference: Run, at: str
) -> None:
    step = {"forward": 7, "done": 6}[at]
    faulty = run(ranks, tmp_path / "c", *later(1, 6, f"{at} {step}", "SIGKILL"))
    assert faulty.restored() == {0: (6, LIVE), 1: (6, REPLICA)}
    check_same(faulty, reference)


@KEPT
@pytest.mark.parametrize("do", ["raise", pytest.param("SIGKILL", marks=SLOW)])
@pytest.mark.parametrize(
    "at", ["torn", *(pytest.param(a, marks=SLOW) for a in ("computed", "stepped"))]
)
def test_a_fault_after_the_gradients_were_exchanged(
    ranks: Ranks, tmp_path: Path, reference: Run, at: str, do: str, kept: bool
) -> None:
    """Rank 0 completes the step, and rank 1 does not: rank 0 sends its state."""
    faulty = run(
        ranks,
        tmp_path / "c",
        fault(0, "done 7", "mark done"),
        fault(1, f"{at} 7", f"await done, {do}"),
        kept=kept,
    )
    assert faulty.restored() == {0: (7, LIVE), 1: (7, REPLICA)}
    check_same(faulty, reference, None if at == "stepped" else (1, 7))


@SLOW
@pytest.mark.parametrize("over", ["memory", "group"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_second_fault_during_the_transfer_loses_nothing(
    ranks: Ranks, tmp_path: Path, reference: Run, who: int, over: str
) -> None:
    faulty = run(
        ranks,
        tmp_path / "c",
        fault(0, "done 7", "mark done"),
        fault(1, "torn 7", "await done, raise"),
        fault(who, "transfer", "raise another", iteration=1),
        over=over,
    )
    assert faulty.restored() == {}
    assert faulty.restored(2) == {0: (7, LIVE), 1: (7, REPLICA)}
    check_same(faulty, reference, (1, 7))


@SLOW
@pytest.mark.parametrize("who", [0, 1])
def test_memory_that_is_lost_before_the_transfer_keeps_nobody_waiting(
    ranks: Ranks, tmp_path: Path, reference: Run, who: int
) -> None:
    """A rank takes its part in the transfer from what it has offered."""
    faulty = run(
        ranks,
        tmp_path / "c",
        fault(0, "done 7", "mark done"),
        fault(1, "torn 7", "await done, raise"),
        fault(who, "chosen", "lose", iteration=1),
    )
    assert faulty.restored() == {0: (7, LIVE), 1: (7, REPLICA)}
    check_same(faulty, reference, (1, 7))


@SLOW
@pytest.mark.parametrize("at", ["begin", "restored", "forward 8"])
def test_a_second_fault_soon_after_loses_nothing(
    ranks: Ranks, tmp_path: Path, reference: Run, at: str
) -> None:
    faulty = run(
        ranks,
        tmp_path / "c",
        *later(1, 7, "forward 8", "raise", iteration=0),
        fault(0, at, "raise another", iteration=1),
    )
    assert faulty.restored(2) == {0: (7, LIVE), 1: (7, LIVE)}
    check_same(faulty, reference)


@SLOW
@pytest.mark.parametrize("at", ["forward 7", "transfer"])
def test_two_kills_without_a_step_between(
    ranks: Ranks, tmp_path: Path, reference: Run, at: str
) -> None:
    """The first rank that was killed is a replica once it has received the state."""
    faulty = run(
        ranks,
        tmp_path / "c",
        *later(1, 6, "forward 7", "SIGKILL", iteration=0),
        fault(0, at, "SIGKILL", iteration=1),
    )
    if at == "transfer":  # in which the last process that had the state ends
        assert {step for step, _ in faulty.restored(2).values()} == {4}
    else:
        assert faulty.restored(2) == {0: (6, REPLICA), 1: (6, LIVE)}
    check_same(faulty, reference)


@KEPT
def test_a_checkpoint_is_loaded_if_no_rank_is_between_two_steps(
    ranks: Ranks, tmp_path: Path, reference: Run, kept: bool
) -> None:
    faulty = run(
        ranks,
        tmp_path / "c",
        fault(0, "torn 7", "mark torn, stay"),
        fault(1, "torn 7", "await torn, raise"),
        kept=kept,
    )
    assert {step for step, _ in faulty.restored().values()} == {4}
    assert {source for _, source in faulty.restored().values()} <= {"memory", "storage"}
    check_same(faulty, reference)


@SLOW
@pytest.mark.parametrize("do", ["write", "swap"])
def test_a_write_to_a_parameter_is_noticed(
    ranks: Ranks, tmp_path: Path, reference: Run, do: str
) -> None:
    faulty = run(ranks, tmp_path / "c", *later(0, 6, "forward 7", f"{do}, raise"))
    assert faulty.restored() == {0: (6, REPLICA), 1: (6, LIVE)}
    check_same(faulty, reference)


@SLOW
def test_without_live_a_checkpoint_is_loaded(ranks: Ranks, tmp_path: Path, reference: Run) -> None:
    faulty = run(ranks, tmp_path / "c", fault(1, "forward 7", "raise"), job={"live": False})
    assert {step for step, _ in faulty.restored().values()} == {4}
    check_same(faulty, reference)


@SLOW
def test_a_checkpoint_is_loaded_if_a_fault_comes_back(
    ranks: Ranks, tmp_path: Path, reference: Run
) -> None:
    """The state of the survivors may be its reason, for example weights that are not numbers."""
    faulty = run(
        ranks,
        tmp_path / "c",
        *later(1, 6, "forward 7", "raise", iteration=0),
        fault(1, "forward 7", "raise", iteration=1),
    )
    assert faulty.restored() == {0: (6, LIVE), 1: (6, LIVE)}
    assert {step for step, _ in faulty.restored(2).values()} == {4}
    check_same(faulty, reference)


@SLOW
def test_a_program_that_catches_its_own_exception_gets_a_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    """It wants the state from before what has gone wrong, and not the newest one."""
    with ranks("caught", str(tmp_path / "c"), nprocs=1) as job:
        job.start_all()
        assert job.wait_all() == {0: 0}, job.errors(0)
        found = [line for line in job.lines(0) if line["event"] == "restored"]
    assert [line["step"] for line in found] == [0, 2]
    assert found[1]["source"] not in (LIVE, REPLICA)

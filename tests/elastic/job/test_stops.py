"""A stop outlives restarts: all ranks leave together, with the state of the last save intact."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from procs import Job, Line

Ranks = Callable[..., Job]
STEPS = 12  # of the two epochs of `stops.py`


class Training:
    """The jobs of `stops.py` on one folder."""

    def __init__(self, ranks: Ranks, path: Path) -> None:
        self._ranks, self.path = ranks, path

    def start(self, *faults: dict[str, Any], **plan: Any) -> Job:
        return self._ranks("stops", json.dumps({"path": str(self.path), "faults": faults, **plan}))

    def run(self, *faults: dict[str, Any], **plan: Any) -> tuple[dict[int, int], list[Line]]:
        """Runs a job to its end; returns the exit codes, and the lines of all ranks."""
        with self.start(*faults, **plan) as job:
            job.start_all()
            codes = job.wait_all()
            self.errors = "\n".join(job.errors(rank) for rank in range(2))
            return codes, [line for rank in range(2) for line in job.lines(rank)]

    @property
    def saved(self) -> int:
        """The newest step on storage."""
        return max(int(path.name.removeprefix("step-")) for path in self.path.glob("step-*"))

    def finish(self) -> list[Line]:
        """Resumes the job from storage, without faults."""
        saved = self.saved
        codes, lines = self.run()
        assert codes == {0: 0, 1: 0}, self.errors
        assert {line["step"] for line in events(lines, "restored")} == {saved}
        return lines


def fault(rank: int, at: str, do: str, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "at": at, "do": do, **more}


def events(lines: list[Line], event: str) -> list[Line]:
    return [line for line in lines if line["event"] == event]


def losses(*lines: Line) -> dict[tuple[int, int], str]:
    """The loss of each rank at each step, the last time it was trained."""
    return {(line["of"], line["step"]): line["loss"] for line in events(list(lines), "trained")}


@pytest.fixture
def training(ranks: Ranks, tmp_path: Path) -> Training:
    return Training(ranks, tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> list[Line]:
    """The lines of a run without stops and faults."""
    folder = tmp_path_factory.mktemp("reference")
    script = Path(__file__).parents[1] / "scripts" / "stops.py"
    plan = json.dumps({"path": str(folder / "checkpoints")})
    with Job(folder, script, nprocs=2, args=[plan], spawn=zygote.spawn) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, job.errors(0) + job.errors(1)
        return [line for rank in range(2) for line in job.lines(rank)]


def check(
    training: Training,
    codes: dict[int, int],
    lines: list[Line],
    reference: list[Line],
    *,
    killed: int = -1,
) -> None:
    """All ranks have left with 143, no rank trained alone or twice, and the result is the same."""
    wanted = {rank: -signal.SIGKILL if rank == killed else 143 for rank in range(2)}
    assert codes == wanted, training.errors
    assert {line["size"] for line in events(lines, "trained")} == {2}, "a rank trained alone"
    resumed = training.finish()
    assert losses(*lines, *resumed) == losses(*reference)
    for name in ("ended",):
        assert {line["weights"] for line in events(resumed, name)} == {
            line["weights"] for line in events(reference, name)
        }


# In all of these, steps 3, 6, ... are saved. The requester waits until its request is in the store.
@pytest.mark.parametrize(
    ("told", "fails"),
    [
        (0, 1),
        (1, 0),
        (0, 0),
    ],
)
@pytest.mark.slow
def test_a_signal_and_an_exception_in_the_same_step(
    training: Training, reference: list[Line], told: int, fails: int
) -> None:
    codes, lines = training.run(
        fault(told, "step 5", "SIGTERM, known, mark told"),
        fault(fails, "step 5", "await told, raise"),
    )
    assert not [line for line in events(lines, "trained") if line["iteration"] > 0]
    # The rank that failed has not completed its step. If the other one has, it sends the state. If
    # that is in the midst of the step, step 3 is left; if it has not begun to write, step 4.
    assert training.saved in (3, 4, 5)
    assert f"rank {told} on " in training.errors
    if training.saved == 3:
        assert re.search(r"step 3 is saved; the steps up to [45], done before", training.errors)
    check(training, codes, lines, reference)


@pytest.mark.slow
def test_a_request_that_the_restart_overtakes(training: Training, reference: list[Line]) -> None:
    """It is not in the store when the next iteration is decided: this one makes a last step."""
    codes, lines = training.run(
        fault(0, "step 5", "SIGTERM, mark told"), fault(1, "step 5", "await told, raise"), late=1
    )
    again = {line["step"] for line in events(lines, "trained") if line["iteration"] > 0}
    assert again
    assert training.saved == max(again)
    check(training, codes, lines, reference)


@pytest.mark.slow
def test_a_state_in_memory_only_is_saved_before_the_ranks_leave(
    training: Training, reference: list[Line]
) -> None:
    """The fault drops the save of step 6, which all ranks still have in memory."""
    codes, lines = training.run(
        fault(0, "saving 6", "SIGTERM, known, mark told"),
        fault(1, "saving 6", "await told, raise"),
        job={"overlap": False},
    )
    assert training.saved == 6
    check(training, codes, lines, reference)


@pytest.mark.slow
def test_a_fault_during_the_last_save(training: Training, reference: list[Line]) -> None:
    codes, lines = training.run(
        fault(0, "step 4", "SIGTERM"),
        *(fault(0, f"saving {step}", "mark taken", iteration=0) for step in range(4, 13)),
        *(fault(1, f"saving {step}", "await taken, raise", iteration=0) for step in range(4, 13)),
        every=100,
        job={"overlap": False},
    )
    assert training.saved == max(line["step"] for line in events(lines, "trained")) >= 4
    check(training, codes, lines, reference)


@pytest.mark.slow
def test_a_signal_between_two_iterations(training: Training, reference: list[Line]) -> None:
    codes, lines = training.run(
        fault(0, "step 5", "raise"), fault(1, "begin", "SIGTERM, known", iteration=1)
    )
    check(training, codes, lines, reference)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["begin", "restored"])
def test_a_job_that_fails_in_every_iteration_ends(
    training: Training, reference: list[Line], at: str
) -> None:
    at_restart = [fault(1, at, "raise", iteration=k) for k in range(1, 50)]
    codes, lines = training.run(
        fault(0, "step 5", "SIGTERM, known, mark told"),
        fault(1, "step 5", "await told, raise"),
        *at_restart,
    )
    assert max(line["iteration"] for line in events(lines, "entered")) == 1
    if at == "begin":
        assert "RuntimeError: a planned fault" in training.errors
        told = "the job was told to stop .*: step [45], the newest one .* is saved now"
        assert len(re.findall(told, training.errors)) == 1
    # With "restored", what rank 0 had completed is saved before rank 1 would fail.
    assert training.saved in ((4, 5) if at == "begin" else (3, 4, 5))
    check(training, codes, lines, reference)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_rank_that_got_the_signal_is_killed(
    training: Training, reference: list[Line], killed: int
) -> None:
    codes, lines = training.run(fault(killed, "step 5", "SIGTERM, known, SIGKILL"))
    assert training.saved in (4, 5), "the other rank saves it"
    check(training, codes, lines, reference, killed=killed)


@pytest.mark.slow
def test_the_signal_that_ends_a_hung_rank_is_no_request_to_stop(
    training: Training, reference: list[Line]
) -> None:
    codes, lines = training.run(
        fault(1, "step 5", "hang"),
        job={"min_ranks": 1, "linger": 0},
        timeouts={"soft_timeout": 8, "hard_timeout": 10},
    )
    assert codes == {0: 0, 1: -signal.SIGTERM}, training.errors
    assert {(line["of"], line["size"]) for line in events(lines, "restored")} == {
        (0, 2),
        (1, 2),
        (0, 1),
    }
    assert max(line["step"] for line in events(lines, "trained")) == STEPS
    assert "told to stop" not in training.errors


@pytest.mark.slow
def test_a_signal_to_all_twice_and_faults_on_all(training: Training, reference: list[Line]) -> None:
    codes, lines = training.run(
        *(fault(rank, "step 5", "SIGTERM, SIGTERM, SIGUSR1, known, raise") for rank in range(2))
    )
    check(training, codes, lines, reference)


@pytest.mark.slow
def test_the_last_save_is_no_hang(ranks: Ranks, tmp_path: Path) -> None:
    """It takes twice the soft timeout, at the end of the `with` block."""
    with ranks("slow_end", str(tmp_path / "checkpoints"), "10") as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, job.errors(0)
        lines = [line for rank in range(2) for line in job.lines(rank)]
    assert [line["iteration"] for line in lines] == [0, 0]

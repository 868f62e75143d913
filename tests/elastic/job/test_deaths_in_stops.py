"""A rank dies while the job stops: the others save the newest state, and the job ends as told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.runs import Run
from procs import Line

SCRIPTS = Path(__file__).parents[1] / "scripts"
FUTURE = "from __future__ import annotations\n"
SCRIPT = (
    (SCRIPTS / "stops.py")
    .read_text()
    .replace(FUTURE, f"{FUTURE}import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\n")
)
SLOW = pytest.mark.slow
SAVED = "saved, exit code 143,"


class Training:
    """Jobs of `stops.py` under `outlast run`, on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "checkpoints"
        self.lines: list[Line] = []

    def start(
        self, *faults: dict[str, Any], options: Sequence[str] = (), ranks: int = 2, **plan: Any
    ) -> Run:
        plan = {"path": str(self.path), "faults": faults, "every": 100, **plan}
        given = f"--nproc-per-node={ranks}", *options
        return Run(self.folder, SCRIPT, *given, args=[json.dumps(plan)], quiet=False)

    def end(self, run: Run, code: int) -> None:
        assert run.wait() == code, run.err
        self.lines += lines_of(run)

    def of(self, event: str) -> list[Line]:
        return [line for line in self.lines if line["event"] == event]

    def losses(self) -> set[tuple[int, int, str]]:
        return {(line["of"], line["step"], line["loss"]) for line in self.of("trained")}

    @property
    def saved(self) -> int:
        return max(int(path.name.removeprefix("step-")) for path in self.path.glob("step-*"))


def lines_of(run: Run) -> list[Line]:
    texts = run.out[: run.out.rfind("\n") + 1].splitlines()
    return [json.loads(text[text.index("{") :]) for text in texts if "{" in text]


def told(run: Run) -> int:
    """Waits until a rank has got to its fault; returns its process."""

    def found() -> Iterator[int]:
        return (line["pid"] for line in lines_of(run) if line["event"] == "told")

    return next(run.until(lambda: any(found()) and found(), "a rank to get to its fault"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> Training:
    training = Training(tmp_path_factory.mktemp("reference"))
    with training.start() as run:
        training.end(run, 0)
    return training


@pytest.fixture
def training(tmp_path: Path, zygote: Any) -> Training:
    return Training(tmp_path)


def check(training: Training, reference: Training, run: Run, how: str, *, lost: int) -> None:
    """The newest step that the others had is saved; the next job continues from it, bit by bit."""
    assert run.verdict == f"job stopped {how}: {SAVED}", run.err
    assert f"rank {lost} " in run.err
    assert "not replaced, the job was told to stop" in run.err
    saved, trained = training.saved, max(line["step"] for line in training.of("trained"))
    assert 5 <= saved <= trained, "a step that no rank has left may be torn"
    count = len(training.of("restored"))
    with training.start() as second:
        training.end(second, 0)
    assert {line["step"] for line in training.of("restored")[count:]} == {saved}
    assert training.losses() == reference.losses()
    weights = {line["weights"] for line in training.of("ended")}
    assert weights == {line["weights"] for line in reference.of("ended")}


def fault(rank: int, at: str, do: str) -> dict[str, Any]:
    return {"rank": rank, "at": at, "do": do, "iteration": 0}


@pytest.mark.slow
@pytest.mark.parametrize("standby", [0, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("late", [2, pytest.param(0, marks=SLOW)])
def test_a_death_before_the_ranks_agree(
    training: Training, reference: Training, late: int, standby: int
) -> None:
    """The other rank waits for the dead one in a collective, and handles the signal afterwards:
    with `late`, its request reaches the store only after all decisions that follow the death.
    """
    options = [f"--standby={standby}"]
    with training.start(fault(1, "step 6", "tell, stay"), options=options, late=late) as run:
        process = told(run)
        run.process.send_signal(signal.SIGTERM)
        run.until_said("SIGTERM: forwarded")
        os.kill(process, signal.SIGKILL)
        training.end(run, 143)
    check(training, reference, run, "by SIGTERM", lost=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "standby"),
    [(0, 0), pytest.param(0, 1, marks=SLOW), pytest.param(1, 0, marks=SLOW)],
)
@pytest.mark.parametrize("to_launcher", [False, pytest.param(True, marks=SLOW)])
def test_a_death_between_the_agreement_and_the_save(
    training: Training, reference: Training, lost: int, standby: int, to_launcher: bool
) -> None:
    told_at = fault(1, "step 5", "tell, known" if to_launcher else "SIGTERM, known")
    faults = told_at, fault(lost, "agreed", "SIGABRT")
    with training.start(*faults, options=[f"--standby={standby}", "--max-restarts=0"]) as run:
        if to_launcher:
            told(run)
            run.process.send_signal(signal.SIGTERM)
        training.end(run, 143)
    check(training, reference, run, "by SIGTERM" if to_launcher else "as told", lost=lost)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "phase"),
    [
        pytest.param(1, "writing", marks=SLOW),
        (0, "committing"),
        pytest.param(1, "committing", marks=SLOW),
        pytest.param(0, "committed", marks=SLOW),
    ],
)
@pytest.mark.parametrize("standby", [0, pytest.param(1, marks=SLOW)])
def test_a_death_in_the_last_save(
    training: Training, reference: Training, lost: int, phase: str, standby: int
) -> None:
    """Only the save for the stop comes after step 4."""
    chaos = training.folder / "chaos.json"
    chaos.write_text(
        json.dumps({"faults": [{"rank": lost, "kind": "abort", "step": 5, "phase": phase}]})
    )
    options = [f"--standby={standby}", f"--chaos={chaos}"]
    with training.start(fault(1, "step 5", "SIGTERM, known"), options=options) as run:
        training.end(run, 143)
    check(training, reference, run, "as told", lost=lost)


@SLOW
def test_a_hang_in_the_last_save(training: Training, reference: Training) -> None:
    """A rank that keeps the GIL for good is ended when the grace time is over, not only after the
    time that a save may take.
    """
    chaos, hang = training.folder / "chaos.json", {"kind": "hang_gil", "phase": "committing"}
    chaos.write_text(json.dumps({"faults": [{"rank": 0, "step": 5, **hang}]}))
    stop, timeouts = fault(1, "step 5", "SIGTERM, known"), {"soft_timeout": 2, "hard_timeout": 4}
    options, job = ["--standby=0", f"--chaos={chaos}"], {"grace": 3}
    with training.start(stop, options=options, job=job, timeouts=timeouts) as run:
        training.end(run, 143)
    check(training, reference, run, "as told", lost=0)


@pytest.mark.slow
def test_a_death_of_the_only_rank(training: Training) -> None:
    """Nothing is left that could be saved; the next job continues from the newest checkpoint."""
    with training.start(fault(0, "step 5", "SIGTERM, known, SIGABRT"), ranks=1) as run:
        training.end(run, 143)
    prevented = "job stopped as told: NOT saved, a fault prevented the last save, exit code 143,"
    assert run.verdict == prevented, run.err
    assert training.saved == 0

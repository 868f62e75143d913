"""A rank is lost for good: a `Job` continues with fewer ranks only where that was chosen."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from procs import Job, Line
from zygote import shared

SCRIPT = Path(__file__).parents[1] / "scripts" / "stops.py"
OUTLAST = ("outlast.launch", "run", "--standby=0", "--nproc-per-node", "2")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
KILLED = {"rank": 1, "at": "step 5", "do": "SIGKILL"}

pytestmark = pytest.mark.usefixtures("zygote")


class Launched:
    """A job of `stops.py` under a launcher, which is rank 0 of a `procs.Job`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "checkpoints"
        self.code = 0
        self.errors = ""

    def run(self, launcher: tuple[str, ...], *faults: dict[str, Any], **plan: Any) -> list[Line]:
        """Runs the job to its end; returns the lines of all ranks."""
        with self.start(launcher, *faults, **plan) as job:
            return self.finish(job)

    def start(self, launcher: tuple[str, ...], *faults: dict[str, Any], **plan: Any) -> Job:
        text = json.dumps({"path": str(self._path), "faults": faults, **plan})
        arguments = (*launcher, str(SCRIPT), text)
        job = Job(self._folder, "-m", nprocs=1, args=arguments, spawn=shared().launch)
        job.start_all()
        return job

    def finish(self, job: Job) -> list[Line]:
        self.code = job.wait(0)
        self.errors = job.errors(0)
        found = (line[line.find("{") :] for line in job.output(0).splitlines() if "{" in line)
        # The workers of torchrun share one pipe: a line may contain several events.
        return [event for line in found for event in _objects(line)]

    @property
    def saved(self) -> int:
        return max(int(path.name.removeprefix("step-")) for path in self._path.glob("step-*"))


def _objects(text: str) -> Iterator[Line]:
    decoder = json.JSONDecoder()
    while (start := text.find("{")) >= 0:
        value, end = decoder.raw_decode(text, start)
        yield value
        text = text[end:]


@pytest.fixture
def launched(tmp_path: Path) -> Launched:
    return Launched(tmp_path)


def sizes(lines: list[Line], event: str) -> dict[int, set[int]]:
    """The sizes with which the iterations had such an event."""
    found: dict[int, set[int]] = {}
    for line in lines:
        if line["event"] == event:
            found.setdefault(line["iteration"], set()).add(line["size"])
    return found


@pytest.mark.slow
def test_too_few_ranks_are_refused(launched: Launched) -> None:
    lines = launched.run((*OUTLAST, "--max-restarts=0"), KILLED)
    assert launched.code == 128 + signal.SIGKILL
    assert sizes(lines, "entered") == {0: {2}}, launched.errors
    assert launched.saved in (4, 5), "rank 0 may have completed the step in which rank 1 is killed"
    told = f"step {launched.saved}, the newest one that the ranks had, is saved now"
    assert told in launched.errors
    assert "RestartAbort: rank 1 was lost" in launched.errors
    assert "killed by SIGKILL" in launched.errors
    assert "the job has 1 of 2 ranks left, and needs 2" in launched.errors
    assert "pass min_ranks=1 to outlast.Job" in launched.errors


@pytest.mark.slow
def test_a_smaller_size_that_was_chosen(launched: Launched) -> None:
    lines = launched.run((*OUTLAST, "--max-restarts=0"), KILLED, job={"min_ranks": 1})
    assert launched.code == 0, launched.errors
    assert sizes(lines, "trained") == {0: {2}, 1: {1}}


@pytest.mark.slow
def test_the_restart_waits_for_the_replacement(launched: Launched) -> None:
    lines = launched.run(OUTLAST, KILLED)
    assert launched.code == 0, launched.errors
    assert sizes(lines, "trained") == {0: {2}, 1: {2}}, "one restart, and no rank alone"
    (weights,) = {line["weights"] for line in lines if line["event"] == "ended"}
    (whole,) = {
        line["weights"]
        for line in Launched(launched._folder / "whole").run(OUTLAST)
        if line["event"] == "ended"
    }
    assert weights == whole


@pytest.mark.slow
def test_no_rank_trains_or_saves_alone_under_torchrun(launched: Launched) -> None:
    lines = launched.run(TORCHRUN, KILLED)
    assert launched.code == 1
    assert sizes(lines, "restored") == {0: {2}}
    assert sizes(lines, "trained") == {0: {2}}
    assert launched.saved in (3, 4, 5)  # rank 0 has saved its state, unless torchrun was faster


@pytest.mark.slow
def test_progress_between_the_faults_of_a_long_job(launched: Launched) -> None:
    """More faults than `--max-restarts`; then one that comes back before any further step."""
    faults = [{**KILLED, "at": f"step {step}"} for step in (5, 8, 10)]
    launched.run((*OUTLAST, "--max-restarts=1"), *faults)
    assert launched.code == 0, launched.errors
    assert launched.errors.count("replacement 1 of 1") == 3
    again = Launched(launched._folder / "again")
    again.run((*OUTLAST, "--max-restarts=1"), {**KILLED, "at": "restored", "always": True})
    assert again.code == 128 + signal.SIGKILL
    assert "(--max-restarts: 1 without a further training step)" in again.errors
    assert again.errors.count("replacement 1 of 1") == 1
    assert again.saved == 0


FAILS = {"rank": 1, "at": "step 5", "do": "known, raise"}
WAITS = {"rank": 0, "at": "step 5", "do": "mark ready, known"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("launcher", "code"), [(OUTLAST, None), (TORCHRUN, 1)])
def test_a_signal_to_the_launcher_and_a_fault(
    launched: Launched, launcher: tuple[str, ...], code: int | None, number: signal.Signals
) -> None:
    with launched.start(launcher, WAITS, FAILS) as job:
        ready = Path(f"{launched._path}-marks") / "ready"
        _await(job, ready.exists)
        job.send(0, number)
        lines = launched.finish(job)
    assert launched.code == (128 + number if code is None else code), launched.errors
    assert sizes(lines, "trained") == {0: {2}}
    # If rank 0 has completed its step when it is interrupted, rank 1 gets its state.
    assert launched.saved in (3, 5)
    if code is None:
        assert "still running, killed" not in launched.errors
    if launched.saved == 3:
        assert re.search(r"step 3 is saved; the steps up to [45], done before", launched.errors)


@pytest.mark.slow
def test_a_rank_that_was_told_to_stop_and_killed_is_not_replaced(launched: Launched) -> None:
    lines = launched.run(OUTLAST, {**KILLED, "do": "SIGTERM, known, SIGKILL"})
    assert launched.code == 143, launched.errors
    assert sizes(lines, "entered") == {0: {2}}
    assert "not replaced, the job was told to stop" in launched.errors
    assert launched.saved in (4, 5)
    assert f"step {launched.saved}, the newest one that the ranks had, is saved" in launched.errors


def _await(job: Job, condition: Callable[[], bool]) -> None:
    while not condition():
        assert job.running(0), job.errors(0)
        time.sleep(0.01)

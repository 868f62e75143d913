"""Runs the program of a framework's user under `outlast run`, through faults of a plan.

Each program prints JSON lines (`planned_faults.say`): `restored` when it begins, and what it
computes, with a name and a value. It stops by itself when a plan sends it SIGTERM, and is then run
again, as by a scheduler.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.runs import Run

SCRIPTS = Path(__file__).parent / "scripts"
PLANNED_FAULTS = Path(__file__).parents[1] / "elastic" / "scripts"

_LINE = re.compile(r"^\[\d\] (\{.*\})$", re.MULTILINE)

Fault = dict[str, Any]


@dataclasses.dataclass
class Result:
    """What the processes of all runs have printed, and the exit codes of the runs."""

    lines: list[dict[str, Any]]
    codes: list[int]
    errors: str

    def values(self) -> dict[tuple[int, str], set[str]]:
        """All values of each rank, by their names."""
        found: dict[tuple[int, str], set[str]] = {}
        for line in self.lines:
            if line["event"] == "computed":
                found.setdefault((line["of"], line["name"]), set()).add(str(line["value"]))
        return found

    def restored(self) -> list[tuple[int, str]]:
        """The step from which rank 0 continued, and where it was found, each time."""
        found = [each for each in self.lines if each["event"] == "restored" and each["of"] == 0]
        return [(line["step"], line["source"]) for line in found]


def run(
    folder: Path,
    script: str,
    faults: Sequence[Fault] = (),
    *,
    nprocs: int = 2,
    then: int = 2,
    **plan: Any,
) -> Result:
    """Runs a program to its end; again after each exit with 143, on `then` processes."""
    folder.mkdir(exist_ok=True)
    argument = json.dumps({"path": str(folder / "state"), "faults": faults, **plan})
    options = [f"--nproc-per-node={nprocs}", "--max-restarts=8"]
    environment = {
        "PYTHONPATH": str(PLANNED_FAULTS),
        "HF_HUB_OFFLINE": "1",
        "TENSORBOARD_LOGGING_DIR": str(folder / "state-runs"),
    }
    result = Result([], [], "")
    source = (SCRIPTS / f"{script}.py").read_text()
    while not result.codes or result.codes[-1] == 143:
        with Run(folder, source, *options, args=[argument], env=environment) as job:
            result.codes.append(job.wait(400.0))
            result.lines += [json.loads(line) for line in _LINE.findall(job.out)]
            result.errors += job.err
        options[0] = f"--nproc-per-node={then}"
    assert result.codes[-1] == 0, result.errors[-10_000:]
    return result


def waiting(rank: int, at: str, do: str, *, for_other: str) -> list[Fault]:
    """A fault of one of two ranks that waits until the other one has reached a point."""
    name = f"{for_other} before {at}"
    return [
        {"rank": 1 - rank, "at": for_other, "do": f"mark {name}"},
        {"rank": rank, "at": at, "do": f"await {name}, {do}"},
    ]


def check_same(faulty: Result, undisturbed: Result) -> None:
    """Each value is that of the run without faults, however often it was computed. A rank that is
    replaced, or receives the state of another, may not have told a value of that step itself.
    """
    expected, found = undisturbed.values(), faulty.values()
    different = {key: (v, expected.get(key)) for key, v in found.items() if v != expected.get(key)}
    assert not different, f"{different}\n{faulty.errors[-10_000:]}"
    missing = {name for _, name in expected} - {name for _, name in found}
    assert not missing, faulty.errors[-10_000:]

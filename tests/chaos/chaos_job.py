"""Runs a training under a plan, as `outlast run --chaos` does, and compares it with one without."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from outlast.async_checkpoint import Checkpointer
from outlast.chaos.fired_faults import MarkerDirectory
from outlast.errors import CheckpointError
from procs import LINGER_S, MARKER, marked
from zygote import shared

SCRIPT = Path(__file__).parent / "scripts" / "trains.py"


@dataclasses.dataclass
class Outcome:
    """What a job printed, fired, and left.

    Attributes:
        losses: of each rank and step, every value that it had: one, if all is well.
        weights: the hashes of the final weights of the ranks.
        fired: kind and phase of the faults, in order.
        valid, damaged: the steps of the checkpoints that it left.
    """

    code: int
    output: str
    losses: dict[tuple[int, int], set[str]]
    weights: set[str]
    iterations: int
    fired: list[tuple[str, str]]
    valid: list[int]
    damaged: list[int]


def run(
    folder: Path, faults: Sequence[dict[str, Any]] = (), *, steps: int = 16, nprocs: int = 2
) -> Outcome:
    """Runs the job to its end. Its processes, those in other sessions included, must end too."""
    folder.mkdir()
    job_id = uuid.uuid4().hex
    state = folder / "fired"
    state.mkdir(mode=0o700)
    command = [sys.executable, "-m", "outlast.launch", "run", f"--nproc-per-node={nprocs}"]
    command += ["--max-restarts=9"]
    if faults:
        (folder / "plan.json").write_text(json.dumps({"faults": list(faults)}))
        command += ["--chaos", str(folder / "plan.json")]
    command += [str(SCRIPT), str(folder / "checkpoints"), str(steps)]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")},
        "OUTLAST_CHAOS_STATE": str(state),
        "OUTLAST_EVENTS_DIR": str(folder / "events"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        MARKER: job_id,
    }
    done = shared().run(command, environment, timeout=300, workers=True)
    output = done.stdout + done.stderr
    left = marked(job_id)
    psutil.wait_procs(left, timeout=LINGER_S)
    assert marked(job_id) == [], output
    lines = [json.loads(line[line.index("{") :]) for line in _json_lines(output)]
    losses: dict[tuple[int, int], set[str]] = defaultdict(set)
    for line in lines:
        if "step" in line:
            losses[line["rank"], line["step"]].add(line["loss"])
    valid, damaged = _checkpoints(folder / "checkpoints")
    return Outcome(
        done.returncode,
        output,
        dict(losses),
        {line["weights"] for line in lines if "weights" in line},
        max((line["iteration"] for line in lines if "step" in line), default=-1),
        [(record["kind"], record["phase"]) for record in MarkerDirectory(state).records()],
        valid,
        damaged,
    )


def check_same(found: Outcome, undisturbed: Outcome) -> None:
    """Checks that each step had the same loss, however often it was done, and the final weights."""
    assert found.code == 0, found.output
    different = {
        key: values for key, values in found.losses.items() if values != undisturbed.losses[key]
    }
    assert not different, f"{different}\n{found.output}"
    assert found.losses.keys() == undisturbed.losses.keys(), found.output
    assert found.weights == undisturbed.weights, found.output
    assert len(found.weights) == 1


def _json_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if '{"rank": ' in line]


def _checkpoints(path: Path) -> tuple[list[int], list[int]]:
    valid, damaged = [], []
    left = [entry.name for entry in path.iterdir() if entry.name.startswith(".tmp-")]
    assert left == []
    with Checkpointer(path) as checkpointer:
        for info in checkpointer.checkpoints():
            try:
                checkpointer.verify(info.step)
                valid.append(info.step)
            except CheckpointError:
                damaged.append(info.step)
    return valid, damaged

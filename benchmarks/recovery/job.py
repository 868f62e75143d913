"""Runs one contender through a plan of faults, until its deadline."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.launched import LaunchedJob, read_log
from benchmarks.recovery.contenders import Contender, environment

__all__ = ["EVERY", "Outcome", "run_job"]

EVERY = 50
"""Steps between two saves."""

_START_S = 120.0
_LAST_RECOVERY_S = 30.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a job has logged, and how it failed, if it did."""

    log: list[dict[str, Any]]
    error: str = ""


def run_job(
    contender: Contender, faults: list[dict[str, Any]], duration: float, every: int = EVERY
) -> Outcome:
    """Runs one job until `duration` seconds after its first step. If its last fault is not over by
    then, until it is, at most for another while: those steps count for the recovery only.
    """
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        said = folder / "said.log"
        (folder / "plan.json").write_text(json.dumps({"faults": faults, "every": every}))
        error = ""
        with LaunchedJob(folder) as job:
            try:
                for command, variables in contender.commands():
                    job.start(command, environment(folder, variables))
                job.wait_for((folder / "started").exists, _START_S, "first step")
                _watch(job, duration)
                _await_last_recovery(job, said)
            except (RuntimeError, OSError) as e:
                error = str(e)
        return Outcome(read_log(said), error)


def _watch(job: LaunchedJob, duration: float) -> None:
    end = time.monotonic() + duration
    while (left := end - time.monotonic()) > 0:
        job.check()
        time.sleep(min(left, 0.5))


def _await_last_recovery(job: LaunchedJob, said: Path) -> None:
    end = time.monotonic() + _LAST_RECOVERY_S
    while time.monotonic() < end and not _recovered(read_log(said)):
        job.check()
        time.sleep(0.5)


def _recovered(log: list[dict[str, Any]]) -> bool:
    """Whether there is a useful step, and one of the rank that failed, after the last fault."""
    last = next((n for n in reversed(range(len(log))) if log[n]["event"] == "fault"), None)
    if last is None:
        return True
    before = max((e["step"] for e in log[:last] if e["event"] == "step"), default=0)
    after = [e for e in log[last:] if e["event"] == "step"]
    useful = any(e["step"] > before for e in after)
    return useful and any(e["rank"] == log[last]["rank"] for e in after)

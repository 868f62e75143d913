"""Runs the training under `outlast run`, and measures what each of its faults costs."""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.launched import LaunchedJob, read_log
from benchmarks.lib.rank_processes import FOLDER
from benchmarks.rollback.ways import SAVED, UNSAVED, WAYS

__all__ = ["KINDS", "RANKS", "measure"]

RANKS = 2
KINDS = ("exception", "sigkill")
_SCRIPT = Path(__file__).with_name("training.py")
_NET_S = 300.0


def measure(mib: int, way: str, faults: int) -> list[dict[str, Any]]:
    """One job with so many faults, exceptions and SIGKILLs in turn; what each of them cost."""
    kinds = [KINDS[number % len(KINDS)] for number in range(faults)]
    root = FOLDER.absolute()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix="rollback-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps({"mib": mib, "way": way, "faults": kinds}))
        with LaunchedJob(folder) as job:
            job.start(_command(), _environment(folder))
            for number, kind in enumerate(kinds):
                _let_fail(job, folder, number, kind)
            last = (SAVED + UNSAVED) * RANKS
            job.wait_for(
                lambda: len(_steps(read_log(folder / "said.log"), faults)) >= last,
                _NET_S,
                "steps after the last fault",
            )
        log = read_log(folder / "said.log")
    return [_figures(log, number, kind, way) for number, kind in enumerate(kinds)]


def _command() -> list[str]:
    run = [sys.executable, "-m", "outlast.launch", "run", f"--nproc-per-node={RANKS}"]
    return [*run, "--standby=1", "--backoff=0", "--max-restarts=1000", str(_SCRIPT)]


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "ROLLBACK_FOLDER": str(folder),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }


def _let_fail(job: LaunchedJob, folder: Path, number: int, kind: str) -> None:
    """Lets the rank fail that waits for it, once a standby is ready."""

    def waits() -> bool:
        said = read_log(folder / "said.log")
        return any(e["event"] == "waiting" and e["iteration"] == number for e in said)

    job.wait_for(waits, _NET_S, f"rank that waits for fault {number}")
    if kind == "sigkill":
        ready = re.compile(r"standby pid \d+ is ready")
        kills = number // 2
        job.wait_for(lambda: len(ready.findall(job.output)) > kills, _NET_S, "standby")
    (folder / f"go-{number}").touch()


def _steps(log: list[dict[str, Any]], iteration: int) -> list[dict[str, Any]]:
    return [e for e in log if e["event"] == "step" and e["iteration"] == iteration]


def _figures(log: list[dict[str, Any]], number: int, kind: str, way: str) -> dict[str, Any]:
    """Of the slower rank, in seconds from the fault."""
    (fault,) = (e["at"] for e in log if e["event"] == "fault" and e["iteration"] == number)
    completed = max(e["step"] for e in _steps(log, number))
    after = _steps(log, number + 1)
    restored = [e for e in log if e["event"] == "restored" and e["iteration"] == number + 1]
    for each in restored:
        if each["source"] not in WAYS[way].sources:
            raise RuntimeError(f"restored from {each['source']!r}, not {WAYS[way].name!r}")
    first = restored[0]["step"] + 1
    times: dict[int, list[float]] = {}
    for each in after:
        times.setdefault(each["rank"], []).append(each["at"])
    undisturbed = [
        later - earlier
        for at in times.values()
        for earlier, later in itertools.pairwise(at[SAVED + 1 :])
    ]
    return {
        "kind": kind,
        "first_step": max(e["at"] for e in after if e["step"] == first) - fault,
        "useful_step": max(e["at"] for e in after if e["step"] == completed + 1) - fault,
        "restore": max(e["at"] - e["began"] for e in restored),
        "redone": completed - restored[0]["step"],
        "moved_bytes": max(e["moved_bytes"] for e in restored),
        "size_bytes": restored[0]["size_bytes"],
        "step": statistics.median(undisturbed),
    }

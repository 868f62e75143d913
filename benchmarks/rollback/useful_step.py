"""From a fault to the end of the first useful step, by the parts of what lies between.

Ranks with DDP, gloo and Adam under `outlast run` with a standby. The first step after a restart
from the survivors is useful: no step is redone.
"""

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
from benchmarks.lib.sheets import Sheet, ms
from benchmarks.rollback.limits import limits

__all__ = ["PARTS", "measure", "run", "sheets"]

PARTS = ("re-entry", "group", "model", "`Job()`", "restore", "DDP", "first step")
_SCRIPT = Path(__file__).with_name("useful_script.py")
_NET_S = 60.0
_CASES = (  # MiB of state, ranks, whether model and optimizer are kept, faults of each kind
    (1, 2, False, 20),
    (1, 2, True, 20),
    (1, 4, False, 20),
    (256, 2, False, 20),
    (256, 2, True, 20),
    (256, 4, False, 10),
    (1024, 2, False, 6),
    (1024, 2, True, 6),
)
_QUICK = ((1, 2, True, 2),)
_KINDS = ("exception", "sigkill", "hang")


def run(quick: bool) -> dict[str, Any]:
    """Measures each kind of fault in each case, and the limits of the machine."""
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"rows": rows, "limits": {}}
    for mib, ranks, kept, faults in _QUICK if quick else _CASES:
        found["limits"][str(mib)] = limits(mib << 20, 1 if quick else 5)
        for kind in _KINDS:
            print(f"useful-step: {mib} MiB, {ranks} ranks, {kind}, kept: {kept}", flush=True)
            each = measure(mib, ranks, kept, kind, faults)
            rows.append({"mib": mib, "ranks": ranks, "kept": kept, "kind": kind, "faults": each})
    return found


def measure(
    mib: int, ranks: int, kept: bool, kind: str, faults: int, *, bare: bool = False
) -> list[dict[str, Any]]:
    """The figures of each fault; `bare`: of what torch alone needs in place of a job."""
    root = FOLDER.absolute()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix="useful-") as name:
        folder = Path(name)
        plan = {"mib": mib, "kept": kept, "faults": [kind] * faults, "bare": bare}
        (folder / "plan.json").write_text(json.dumps(plan))
        with LaunchedJob(folder) as job:
            command = [sys.executable, "-m", "outlast.launch", "run", f"--nproc-per-node={ranks}"]
            command += ["--standby=1", "--backoff=0", "--max-restarts=40", str(_SCRIPT)]
            job.start(command, _environment(folder))
            for number in range(faults):
                _let_fail(job, folder, number, ranks, number if kind == "sigkill" else 0)
            job.wait_for(lambda: len(_iterations(folder, faults)) == ranks, _NET_S, "last steps")
        return [_figures(folder, number) for number in range(faults)]


def _environment(folder: Path) -> dict[str, str]:
    given = [each for each in (os.environ.get("PYTHONPATH"),) if each]
    return {
        **os.environ,
        "ROLLBACK_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join([*given, str(Path(__file__).parents[2])]),
        "OMP_NUM_THREADS": "1",
    }


def _let_fail(job: LaunchedJob, folder: Path, number: int, ranks: int, kills: int) -> None:
    """Lets rank 1 fail once all ranks wait for it and a standby is ready."""

    def waiting() -> bool:
        said = read_log(folder / "said.log")
        found = [e for e in said if e["event"] == "waiting" and e["iteration"] == number]
        return len(found) == ranks

    job.wait_for(waiting, _NET_S, f"ranks that wait for fault {number}")
    ready = re.compile(r"standby pid \d+ is ready")
    job.wait_for(lambda: len(ready.findall(job.output)) > kills, _NET_S, "standby")
    (folder / f"go-{number}").touch()


def _iterations(folder: Path, number: int) -> list[dict[str, Any]]:
    said = read_log(folder / "said.log")
    return [e for e in said if e["event"] == "iteration" and e["iteration"] == number]


def _figures(folder: Path, number: int) -> dict[str, Any]:
    """Of the slowest rank, in seconds: its parts, and what an undisturbed step takes."""
    said = read_log(folder / "said.log")
    (fault,) = (e["at"] for e in said if e["event"] == "fault" and e["iteration"] == number)
    after = _iterations(folder, number + 1)
    for each in after:
        if each["source"] not in ("live", "replica"):
            raise RuntimeError(f"fault {number}: restored from {each['source']!r}")
    slowest = max(after, key=lambda each: float(each["marks"][len(PARTS) - 1]))
    marks = [fault, *slowest["marks"]]
    lengths = [later - earlier for earlier, later in itertools.pairwise(marks)]
    return {
        "parts": dict(zip(PARTS, lengths, strict=False)),
        "total": marks[len(PARTS)] - fault,
        "step": statistics.median(lengths[len(PARTS) + 1 :]),
    }


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The table, with a goal and a verdict in each row."""
    rows = []
    for row in data["rows"]:
        faults = row["faults"]
        parts = {part: statistics.median(each["parts"][part] for each in faults) for part in PARTS}
        totals = [each["total"] for each in faults]
        step = statistics.median(each["step"] for each in faults)
        goal = _goal(row, parts["re-entry"], step, data["limits"][str(row["mib"])])
        total = statistics.median(totals)
        rows.append(
            (
                f"{row['mib']} MiB, {row['ranks']} ranks{', kept' if row['kept'] else ''}: "
                f"{row['kind']}",
                str(len(faults)),
                *(ms(parts[part]) for part in PARTS),
                ms(total),
                ms(max(totals)),
                ms(step),
                ms(goal),
                "met" if total <= goal else f"{total / goal:.1f} x",
            )
        )
    return [
        Sheet(
            "From a fault of one rank to the end of the first useful step: DDP, gloo (ms)",
            ("", "faults", *PARTS, "total", "worst", "a step", "goal", "verdict"),
            rows,
            "Medians of the slowest rank. Kept: model and optimizer are made outside the wrapped "
            "function, and DDP is made with `init_sync=False` after a restore. Goals. Exception: "
            "re-entry, a step and 15 ms. SIGKILL with a standby: re-entry, a step and twice the "
            "state over a loopback socket, at least 120 ms in all. Hang (`Adaptive`, a floor of "
            "100 ms): that of an exception, with 100 ms or three steps until it is seen.",
        )
    ]


def _goal(row: dict[str, Any], entry: float, step: float, limit: dict[str, float]) -> float:
    if row["kind"] == "sigkill":
        return max(0.12, entry + step + 2 * limit["socket"])
    if row["kind"] == "hang":
        return max(0.1, 3 * step) + 0.02 + step + 0.015
    return entry + step + 0.015

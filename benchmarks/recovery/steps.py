"""Time to a number of steps under failures: what a whole training costs, with each system.

Every system trains the same model on the same data, with two ranks, saves every 50 steps, and gets
the faults of the same seeds: exceptions, SIGKILLs, hangs and orders to leave (`outlast drain`, or a
SIGTERM) at random times after the first step, on random ranks. One that is due while its rank is
down is missed. A job ends when both ranks have made the last step. The limit is the time of so many
steps without faults and saves.

A hang is found by the time limit of a collective or, with outlast, of a rank without progress: the
same for all, as nobody waits for gloo's default of 30 minutes.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.launched import LaunchedJob, read_log
from benchmarks.lib.sheets import Sheet
from benchmarks.recovery.contenders import CONTENDERS, RANKS, Contender, environment
from benchmarks.recovery.job import EVERY

__all__ = ["run", "sheets"]

_STEPS, _MEAN_S, _SEEDS = 1500, 15.0, (1,)
"""How many steps; seconds between faults; of which seeds."""
_QUICK = 60, 8.0, (1,)
_KINDS = ("exception", "sigkill", "hang", "leave")
_FOUND_S = 10.0
"""After which a hang is found."""
_PLAIN_STEPS = 400
_START_S, _LIMIT = 120.0, 12.0
_PARTS = (0.25, 0.5, 0.75, 1.0)


def run(quick: bool) -> dict[str, Any]:
    """Runs every system that is installed with the faults of each seed."""
    steps, mean_s, seeds = _QUICK if quick else (_STEPS, _MEAN_S, _SEEDS)
    plain = next(each for each in CONTENDERS if each.name == "torchrun, torch.save")
    before = _plain_step(plain, steps if quick else _PLAIN_STEPS)
    jobs = []
    for seed, contender in itertools.product(seeds, CONTENDERS):
        if not contender.installed:
            continue
        faults = _faults(seed, mean_s, _LIMIT * steps * before)
        found = _job(contender, faults, steps, _LIMIT * steps * before)
        jobs.append({"system": contender.name, "seed": seed, **found})
        print(f"steps-under-failures: {contender.name}, seed {seed}: {_said(found)}", flush=True)
    after = _plain_step(plain, steps if quick else _PLAIN_STEPS)
    return {"steps": steps, "mean": mean_s, "plain": (before + after) / 2, "jobs": jobs}


def _said(found: dict[str, Any]) -> str:
    reached = found["reached"][-1]
    return found["error"] or (f"{reached:.1f} s" if reached else "not reached")


def _faults(seed: int, mean_s: float, until: float) -> list[dict[str, Any]]:
    chosen, at = random.Random(seed), 0.0
    faults = []
    while (at := at + chosen.expovariate(1 / mean_s)) < until:
        faults.append({"at": at, "rank": chosen.randrange(RANKS), "kind": chosen.choice(_KINDS)})
    return faults


def _plain_step(contender: Contender, steps: int) -> float:
    """Seconds of a step without faults and saves."""
    found = _job(contender, [], steps, 300.0, every=10**9)
    if found["error"]:
        raise RuntimeError(f"the run without faults failed: {found['error']}")
    return float(found["step"])


def _job(
    contender: Contender, faults: list[dict[str, Any]], steps: int, limit: float, every: int = EVERY
) -> dict[str, Any]:
    """When the slower rank had made each part of the steps, in seconds from the first step."""
    with tempfile.TemporaryDirectory(prefix="steps-") as name:
        folder, error = Path(name), ""
        said = folder / "said.log"
        plan = {"faults": faults, "every": every}
        (folder / "plan.json").write_text(json.dumps(plan))
        with LaunchedJob(folder) as job:
            try:
                for command, variables in contender.commands():
                    job.start(command, environment(folder, {**variables, "HANG_S": f"{_FOUND_S}"}))
                job.wait_for((folder / "started").exists, _START_S, "first step")
                _watch(job, said, steps, limit)
            except (RuntimeError, OSError) as e:
                error = str(e)
        log = sorted(read_log(said), key=lambda line: float(line["at"]))
    made = [line for line in log if line["event"] == "step"]
    began = made[0]["at"] if made else 0.0
    reached: list[float | None] = []
    for part in _PARTS:
        far = [line for line in made if line["step"] >= part * steps]
        first = [min((e["at"] for e in far if e["rank"] == r), default=None) for r in range(RANKS)]
        known = [at for at in first if at is not None]
        reached.append(max(known) - began if len(known) == RANKS else None)
    times = [line["at"] for line in made if line["rank"] == 0]
    return {
        "reached": reached,
        "faults": [line["kind"] for line in log if line["event"] == "fault"],
        "again": len(made) - len({(line["rank"], line["step"]) for line in made}),
        "step": statistics.median(b - a for a, b in itertools.pairwise(times)) if made else None,
        "error": error,
    }


def _watch(job: LaunchedJob, said: Path, steps: int, limit: float) -> None:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done = {e["rank"] for e in read_log(said) if e["event"] == "step" and e["step"] >= steps}
        if len(done) == RANKS:
            return
        job.check()
        time.sleep(0.5)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """One row for each job, beside the limit."""
    limit = data["steps"] * data["plain"]
    rows = [
        (
            each["system"],
            f"{each['seed']}",
            ", ".join(f"{each['faults'].count(k)} x {k}" for k in _KINDS),
            *(_shown(at) for at in each["reached"]),
            "failed" if each["reached"][-1] is None else f"{each['reached'][-1] / limit:.2f} x",
            _lost(each, limit),
            f"{each['again'] / RANKS:.0f}",
        )
        for each in data["jobs"]
    ]
    rows.append(
        ("no faults, no saves", "", "", *(f"{p * limit:.1f}" for p in _PARTS), "1 x", "", "0")
    )
    errors = [(f"{e['system']}, {e['seed']}", e["error"][:300]) for e in data["jobs"] if e["error"]]
    found = [
        Sheet(
            f"Seconds to {data['steps']:,} steps under failures; {RANKS} ranks, gloo",
            (
                *("system", "seed", "faults"),
                *(f"{p:.0%} of the steps" for p in _PARTS),
                *("by the limit", "seconds lost per fault", "steps made again"),
            ),
            rows,
            f"A fault every {data['mean']:g} s on average, the same ones for all, as long as a job "
            "lasts; without those that were due while their rank was down: who is down for long "
            "meets fewer of them. Until both ranks had "
            f"made so many steps. A hang is found after {_FOUND_S:g} s by each system. Limit: a "
            f"step without faults and saves takes {data['plain'] * 1000:.1f} ms under torchrun.",
        )
    ]
    return [*found, Sheet("What failed", ("job", "error"), errors)] if errors else found


def _lost(job: dict[str, Any], limit: float) -> str:
    """What is more than the limit, by the number of faults."""
    reached, faults = job["reached"][-1], len(job["faults"])
    return "-" if reached is None or not faults else f"{(reached - limit) / faults:.1f}"


def _shown(at: float | None) -> str:
    return "-" if at is None else f"{at:.1f}"

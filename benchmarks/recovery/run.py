"""Time from a fault to the first useful step, and goodput, of whole systems with the same faults.

Every system trains the same model on the same data, with two ranks, and saves every 50 steps. The
faults come at fixed times after the first step, exceptions and SIGKILLs in turn, on each rank in
turn; one that is due while its rank is down is missed. A step is useful if no rank had completed it
before the fault. Goodput is the number of steps reached by the deadline, times the length of a step
without faults and saves, by the time.

A system that is not installed, or whose job fails, is in the table too, with the reason.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from benchmarks.recovery.contenders import CONTENDERS, RANKS
from benchmarks.recovery.figures import KINDS, figures, sheets
from benchmarks.recovery.job import Outcome, run_job

__all__ = ["run", "sheets"]

# Seconds between faults, and the length of a job: a last fault, and some time for its recovery.
# With a step of 34 ms, 36 s are 1,050 steps: as on 16,384 accelerators, where a job fails every
# 1.8 h (Kokolis et al., arXiv:2410.21680) and a step of Llama 3 405B takes 6.2 s
# (arXiv:2407.21783: 16.8 million tokens of 6 x 405e9 operations each, at 400 TFLOP/s an
# accelerator).
_JOBS = {36.0: 125.0, 10.0: 65.0}
_QUICK = {5.0: 12.0}
_PLAIN_S = 20.0


def run(quick: bool) -> dict[str, Any]:
    """Measures every contender at each interval between faults."""
    jobs = _QUICK if quick else _JOBS
    plain_s = 5.0 if quick else _PLAIN_S
    plain = _plain_steps(plain_s)
    if not plain:
        raise RuntimeError("the run without faults failed: there is nothing to compare with")
    missing: dict[str, str] = {}
    outcomes: dict[tuple[str, float], Outcome] = {}
    for interval, duration in jobs.items():
        for contender in CONTENDERS:
            if not contender.installed:
                print(f"recovery: {contender.needs} is not installed", flush=True)
                missing[contender.name] = contender.needs
                continue
            print(f"recovery: {contender.name}, a fault every {interval:g} s", flush=True)
            outcome = run_job(contender, _plan(duration, interval), duration)
            if outcome.error:
                print(f"recovery: {contender.name} failed: {outcome.error}", flush=True)
            outcomes[contender.name, interval] = outcome
    plain += _plain_steps(plain_s)  # the machine may have become faster or slower
    step = statistics.median(plain)
    return {
        "plain_step": step,
        "intervals": [f"{interval:g}" for interval in jobs],
        "durations": list(jobs.values()),
        "packages": sorted({each.package for each in CONTENDERS if each.installed}),
        "systems": {
            name: {"missing": missing[name]}
            if name in missing
            else {
                f"{interval:g}": figures(
                    outcomes[name, interval], len(_plan(duration, interval)), duration, step
                )
                for interval, duration in jobs.items()
            }
            for name in (each.name for each in CONTENDERS)
        },
    }


def _plan(duration: float, interval: float) -> list[dict[str, Any]]:
    """The faults, as long as there is some time left for the recovery."""
    faults: list[dict[str, Any]] = []
    while (at := interval * (len(faults) + 1)) < duration:
        number = len(faults)
        kind, rank = KINDS[number % 2], number // 2 % RANKS
        faults.append({"at": at, "rank": rank, "kind": kind})
    return faults


def _plain_steps(duration: float) -> list[float]:
    """Seconds of each step without faults and saves, under torchrun; none if that fails."""
    contender = next(each for each in CONTENDERS if each.name == "torchrun, torch.save")
    outcome = run_job(contender, [], duration, every=10**9)
    if outcome.error:
        print(f"recovery: the run without faults failed: {outcome.error}", flush=True)
    times: list[float] = [
        line["at"] for line in outcome.log if line["event"] == "step" and line["rank"] == 0
    ]
    return [later - earlier for earlier, later in itertools.pairwise(times)]

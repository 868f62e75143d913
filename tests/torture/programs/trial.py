"""One trial: a program, undisturbed and through faults and stops in each of its phases."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..calls import Calls
from ..crash_states import Result
from ..one_trial import one_trial
from . import compare
from .covering import programs
from .parts import Program, is_refused
from .running import Fault, run
from .source import source

_STEPS = 16  # as in the kit, at two ranks
_MOST_FAULTS = 5  # of a run
_CHAOS = ("save", "writing", "committing", "committed", "restore", "recovery")


def phases(program: Program) -> list[str]:
    """The phases of a step and an epoch of this program."""
    found = ["top", "forward", "before_step", "in_step", "rest", "end"]
    if program["evaluation"] != "no":
        found += ["evaluation_begins", "evaluation", "evaluation_ends"]
    return found if program["loop"] == "plain" else [*found, "epoch_end"]


def plans(program: Program, r: random.Random) -> Iterator[tuple[str, list[Fault], list[Fault]]]:
    """The disturbed runs: a name, faults of the program, and faults of `outlast run --chaos`."""
    ranks = int(program["ranks"])

    def each(kind: str, most: int) -> list[Fault]:
        names = r.sample(phases(program), min(most, len(phases(program))))
        if kind == "kill":
            # An epoch may have one moment for all of these, and three kills without a further step
            # between them end a job.
            rare = [name for name in names if name.startswith(("evaluation", "epoch"))]
            names = [name for name in names if name not in rare[2:]]
        last = _STEPS * 2 // max(ranks, 2) - 2
        steps = sorted(r.randint(1, last) for _ in names)
        return [
            {"kind": kind, "phase": name, "step": step, "rank": r.randrange(ranks)}
            for name, step in zip(names, steps, strict=True)
        ]

    yield "exceptions", each("exception", _MOST_FAULTS), []
    yield "kills", each("kill", _MOST_FAULTS), []
    yield "stops", each("stop", 3), []
    chaos = [
        {"kind": kind, "phase": phase, "step": r.randint(1, 10), "rank": r.randrange(ranks)}
        for phase in r.sample(_CHAOS, 3)
        for kind in r.sample(["exception", "sigkill"], 1)
    ]
    yield "other phases", each("exit", 1) + each("kill", 1), chaos


def try_programs(calls: Calls | None, seed: int, until: float, most: int | None) -> Result:
    """One program, in `most` disturbed runs at the most."""
    return one_trial("programs", seed, partial(_trial, seed=seed, until=until, most=most))


def _trial(
    folder: Path, r: random.Random, *, seed: int, until: float, most: int | None
) -> tuple[int, list[str]]:
    all_programs = programs()
    program = all_programs[seed % len(all_programs)]
    text, ranks = source(program), int(program["ranks"])
    reference = run(text, ranks, folder / "undisturbed", [], [])
    if is_refused(program):
        return 1, compare.wrong_refusal(reference)
    if wrong := compare.wrong_undisturbed(reference):
        return 1, [*wrong, reference.output[-3000:]]
    tried, found = 1, []
    for name, faults, chaos in plans(program, r):
        disturbed = run(text, ranks, folder / name.replace(" ", "-"), faults, chaos)
        wrong = compare.differences(disturbed, reference, program)
        found += [f"through {name}: {each}" for each in wrong]
        tried += 1
        if (most is not None and tried > most) or time.monotonic() > until + 120:
            break
    return tried, found

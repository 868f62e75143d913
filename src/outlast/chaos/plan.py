"""Fault plans: rank, kind, time and phase of each fault; from Python or from a JSON file.

    {
      "faults": [
        {"rank": 1, "kind": "exception", "iteration": 0, "step": 20},
        {"rank": 2, "kind": "sigkill", "step": 60},
        {"rank": 0, "kind": "hang", "after_seconds": 3},
        {"rank": 0, "kind": "slow_disk", "phase": "writing", "seconds": 2}
      ],
      "random": {"seed": 7, "rate_per_step": 0.01, "kinds": ["exception"], "max_faults": 5}
    }

All conditions of an entry must hold. `iteration` must match exactly; `step` and `after_seconds` are
minima, so that a fault is not missed when a restart resumes after its step. An entry without
conditions fires when its rank first enters the training function; with a `phase`, when that begins.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.chaos.kinds import Kind, Phase
from outlast.chaos.plan_validation import Fields, load_json
from outlast.errors import ChaosError
from outlast.system.arguments import Duration, as_timedelta, seconds


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A process's position in the job, and the seconds since its injector was created."""

    rank: int
    iteration: int
    step: int
    seconds: float
    phase: Phase = Phase.STEP


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault of one rank.

    Attributes:
        rank: the rank in the current iteration, which may differ from the initial one.
        iteration: the iteration in which it fires; any by default.
        step: the earliest step at which it fires.
        after_seconds: how long the process must have run.
        phase: what the rank does when it fires.
        seconds: how long it lasts, for kinds with a duration (`Kind.default_seconds`).

    Raises:
        ChaosError: if `seconds` is given for a kind that has no duration.
    """

    rank: int
    kind: Kind
    iteration: int | None = None
    step: int | None = None
    after_seconds: Duration | None = None
    phase: Phase = Phase.STEP
    seconds: Duration | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase", Phase(self.phase))
        if self.seconds is not None:
            if self.kind.default_seconds is None:
                timed = ", ".join(kind for kind in Kind if kind.default_seconds is not None)
                raise ChaosError(
                    f"kind {str(self.kind)!r} takes no 'seconds'; the kinds that do are: {timed}"
                )
            lasts = as_timedelta("seconds", self.seconds, allow_zero=True)
            object.__setattr__(self, "seconds", lasts.total_seconds())
        if self.after_seconds is not None:
            after = as_timedelta("after_seconds", self.after_seconds, allow_zero=True)
            object.__setattr__(self, "after_seconds", after.total_seconds())

    def due(self, moment: Moment) -> bool:
        """Whether every condition holds."""
        return (
            moment.rank == self.rank
            and moment.phase is self.phase
            and (self.iteration is None or moment.iteration == self.iteration)
            and (self.step is None or moment.step >= self.step)
            and (self.after_seconds is None or moment.seconds >= seconds(self.after_seconds))
        )


@dataclass(frozen=True, kw_only=True)
class RandomFaults:
    """Random faults, reproducible by the seed.

    Attributes:
        rate_per_step: the probability of a fault at one step of one rank.
        kinds: the kinds, all equally likely.
        max_faults: the maximum number of faults per job.
        ranks: the ranks that may have faults; all by default.
    """

    seed: int
    rate_per_step: float
    kinds: tuple[Kind, ...]
    max_faults: int
    ranks: tuple[int, ...] | None = None

    def draw(self, moment: Moment) -> Kind | None:
        """The fault of this rank at this step of this iteration, or none."""
        if self.ranks is not None and moment.rank not in self.ranks:
            return None
        # One generator per moment: a rank's draws do not depend on other ranks.
        place = f"{self.seed}/{moment.rank}/{moment.iteration}/{moment.step}"
        generator = random.Random(place)
        return generator.choice(self.kinds) if generator.random() < self.rate_per_step else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Planned faults, random faults, or both."""

    faults: tuple[PlannedFault, ...] = ()
    random: RandomFaults | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan from a JSON file.

        Raises:
            ChaosError: if it cannot be read or is invalid; names the file, entry, field and
                allowed values.
        """
        return cls._parse(load_json(Path(path)), f"{path}: ")

    @classmethod
    def parse(cls, values: Any) -> Plan:
        """The plan in `values`, an object read from JSON.

        Raises:
            ChaosError: as `load` does.
        """
        return cls._parse(values, "")

    @classmethod
    def _parse(cls, values: Any, where: str) -> Plan:
        fields = Fields(values, where + "plan", ("faults", "random"))
        faults = tuple(
            _parse_fault(entry, f"{where}faults[{index}]")
            for index, entry in enumerate(fields.items("faults"))
        )
        random_faults = None
        if fields.has("random"):
            random_faults = _parse_random(values["random"], where + "random")
        if not faults and random_faults is None:
            raise ChaosError(f"{where}plan: no faults; give 'faults', 'random', or both")
        return cls(faults=faults, random=random_faults)

    def to_json(self) -> str:
        """The plan as `load` reads it."""
        faults = [_without_defaults(dataclasses.asdict(fault)) for fault in self.faults]
        values: dict[str, Any] = {"faults": faults} if faults else {}
        if self.random is not None:
            values["random"] = _without_defaults(dataclasses.asdict(self.random))
        return json.dumps(values, indent=2)


def fail_at(
    rank: int,
    step: int | None = None,
    *,
    iteration: int | None = None,
    after_seconds: Duration | None = None,
    kind: Kind | str = Kind.EXCEPTION,
    phase: Phase | str = Phase.STEP,
    seconds: Duration | None = None,
) -> PlannedFault:
    """Makes a planned fault: `Plan(faults=(fail_at(1, step=20),))`."""
    return PlannedFault(
        rank=rank,
        kind=Kind(kind),
        iteration=iteration,
        step=step,
        after_seconds=after_seconds,
        phase=Phase(phase),
        seconds=seconds,
    )


def _parse_fault(values: Any, where: str) -> PlannedFault:
    names = tuple(field.name for field in dataclasses.fields(PlannedFault))
    fields = Fields(values, where, names)

    def duration(name: str) -> float | None:
        return fields.number(name, 0, math.inf) if fields.has(name) else None

    after, lasts = duration("after_seconds"), duration("seconds")
    try:
        return PlannedFault(
            rank=fields.integer("rank"),
            kind=fields.kind("kind"),
            iteration=fields.integer("iteration") if fields.has("iteration") else None,
            step=fields.integer("step") if fields.has("step") else None,
            after_seconds=after,
            phase=fields.choice("phase", Phase) if fields.has("phase") else Phase.STEP,
            seconds=lasts,
        )
    except ChaosError as error:
        text = str(error)
        raise ChaosError(text if text.startswith(where) else f"{where}: {text}") from None


def _parse_random(values: Any, where: str) -> RandomFaults:
    fields = Fields(values, where, ("seed", "rate_per_step", "kinds", "max_faults", "ranks"))
    return RandomFaults(
        seed=fields.integer("seed"),
        rate_per_step=fields.number("rate_per_step", 0, 1),
        kinds=fields.kinds("kinds"),
        max_faults=fields.integer("max_faults"),
        ranks=fields.integers("ranks") if fields.has("ranks") else None,
    )


def _without_defaults(values: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in values.items() if v is not None and v is not Phase.STEP}

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
import enum
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from outlast.chaos.kinds import Kind, Phase
from outlast.errors import ChaosError
from outlast.system.arguments import Duration, as_timedelta, seconds

E = TypeVar("E", bound=enum.Enum)
T = TypeVar("T")


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
        if self.seconds is not None and self.kind.default_seconds is None:
            timed = ", ".join(kind for kind in Kind if kind.default_seconds is not None)
            raise ChaosError(
                f"kind {str(self.kind)!r} takes no 'seconds'; the kinds that do are: {timed}"
            )
        for name in ("seconds", "after_seconds"):
            if (value := getattr(self, name)) is not None:
                duration = as_timedelta(name, value, allow_zero=True)
                object.__setattr__(self, name, duration.total_seconds())

    def due(self, moment: Moment) -> bool:
        return (
            moment.rank == self.rank
            and moment.phase is self.phase
            and (self.iteration is None or moment.iteration == self.iteration)
            and (self.step is None or moment.step >= self.step)
            and (self.after_seconds is None or moment.seconds >= seconds(self.after_seconds))
        )

    @property
    def conditions(self) -> str:
        """When it fires, in words: `step 20, phase save`."""
        after = None if self.after_seconds is None else f"{seconds(self.after_seconds):g} s"
        phase = None if self.phase is Phase.STEP else str(self.phase)
        found = {"iteration": self.iteration, "step": self.step, "after": after, "phase": phase}
        return ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)


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
        return cls.parse(load_json(Path(path)), f"{path}: ")

    @classmethod
    def parse(cls, values: Any, where: str = "") -> Plan:
        """The plan in `values`, an object read from JSON. Errors begin with `where`."""
        fields = Fields(values, where + "plan", ("faults", "random"))
        faults = cls.parse_faults(fields.items("faults"), where)
        random_faults = None
        if fields.has("random"):
            random_faults = _parse_random(values["random"], where + "random")
        if not faults and random_faults is None:
            raise ChaosError(f"{where}plan: no faults; give 'faults', 'random', or both")
        return cls(faults=faults, random=random_faults)

    @staticmethod
    def parse_faults(entries: Sequence[Any], where: str = "") -> tuple[PlannedFault, ...]:
        """The faults in a list that was read from JSON. Errors begin with `where`."""
        return tuple(
            _parse_fault(entry, f"{where}faults[{index}]") for index, entry in enumerate(entries)
        )

    def to_dict(self) -> dict[str, Any]:
        faults = [_without_defaults(fault) for fault in self.faults]
        values: dict[str, Any] = {"faults": faults} if faults else {}
        if self.random is not None:
            values["random"] = _without_defaults(self.random)
        return values

    def to_json(self) -> str:
        """The plan as `load` reads it."""
        return json.dumps(self.to_dict(), indent=2)


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
    fields = Fields(values, where, [field.name for field in dataclasses.fields(PlannedFault)])
    given: dict[str, Any] = {
        "rank": fields.integer("rank"),
        "kind": fields.choice("kind", Kind),
        **{name: fields.integer(name) for name in ("iteration", "step") if fields.has(name)},
        **{
            name: fields.number(name, 0, math.inf)
            for name in ("after_seconds", "seconds")
            if fields.has(name)
        },
    }
    if fields.has("phase"):
        given["phase"] = fields.choice("phase", Phase)
    try:
        return PlannedFault(**given)
    except ChaosError as error:
        raise ChaosError(f"{where}: {error}") from None


def _parse_random(values: Any, where: str) -> RandomFaults:
    fields = Fields(values, where, [field.name for field in dataclasses.fields(RandomFaults)])
    return RandomFaults(
        seed=fields.integer("seed"),
        rate_per_step=fields.number("rate_per_step", 0, 1),
        kinds=fields.each("kinds", lambda value, name: fields.as_choice(value, name, Kind)),
        max_faults=fields.integer("max_faults"),
        ranks=fields.each("ranks", fields.as_integer) if fields.has("ranks") else None,
    )


def _without_defaults(of: PlannedFault | RandomFaults) -> dict[str, Any]:
    values = dataclasses.asdict(of)
    return {name: v for name, v in values.items() if v is not None and v is not Phase.STEP}


def load_json(path: Path) -> Any:
    """Reads a JSON file; a `ChaosError` names the file."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ChaosError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ChaosError(f"{path}: not JSON: {error}") from error


class Fields:
    """The fields of one object of a plan, which errors call `where`. Every method raises
    `ChaosError` for an invalid value; the error names the field and the allowed values.
    """

    def __init__(self, values: Any, where: str, allowed: Sequence[str]) -> None:
        self._where = where
        names = ", ".join(allowed)
        if not isinstance(values, dict):
            raise ChaosError(
                f"{where}: is {_show(values)}; it must be an object with fields of these names: "
                f"{names}"
            )
        unknown = [name for name in values if name not in allowed]
        if unknown:
            raise ChaosError(f"{where}: unknown field {unknown[0]!r}; it must be one of: {names}")
        self._values = values

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, least: int = 0) -> int:
        return self.as_integer(self._get(name), name, least)

    def number(self, name: str, low: float, high: float) -> float:
        value = self._get(name)
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not math.isfinite(value) or not low <= value <= high:
            allowed = f"from {low}" if high == math.inf else f"from {low} to {high}"
            raise self._wrong(name, value, f"a number {allowed}")
        return float(value)

    def choice(self, name: str, choices: type[E]) -> E:
        return self.as_choice(self._get(name), name, choices)

    def items(self, name: str) -> list[Any]:
        """The elements of a list, unchecked; empty if the field is absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return value or []

    def each(self, name: str, check: Callable[[Any, str], T]) -> tuple[T, ...]:
        """A list of at least one element, each as `check` returns it."""
        value = self._get(name)
        if not isinstance(value, list) or not value:
            raise self._wrong(name, value, "a list with at least one element")
        return tuple(check(item, f"{name}[{index}]") for index, item in enumerate(value))

    def as_integer(self, value: Any, name: str, least: int = 0) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._wrong(name, value, f"an integer of at least {least}")
        return value

    def as_choice(self, value: Any, name: str, choices: type[E]) -> E:
        """Checks a value, which errors call `name`."""
        allowed = [choice.value for choice in choices]
        if value not in allowed:
            raise self._wrong(name, value, f"one of: {', '.join(allowed)}")
        return choices(value)

    def _get(self, name: str) -> Any:
        if name not in self._values:
            raise ChaosError(f"{self._where}: field {name!r} is missing")
        return self._values[name]

    def _wrong(self, name: str, value: Any, allowed: str) -> ChaosError:
        return ChaosError(f"{self._where}: field {name!r} is {_show(value)}; it must be {allowed}")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

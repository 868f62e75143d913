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

import datetime
import json
import os
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from outlast.chaos.kinds import Kind, Phase
from outlast.errors import ChaosError
from outlast.system.arguments import Duration, as_timedelta, seconds

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Kinds: TypeAlias = Annotated[tuple[Kind, ...], msgspec.Meta(min_length=1)]
_Ranks: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
E = TypeVar("E", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A process's position in the job, and the seconds since its injector was created."""

    rank: int
    iteration: int
    step: int
    seconds: float
    phase: Phase = Phase.STEP


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An object of a plan, as JSON has it: no other fields, and none that has its default."""


class PlannedFault(Entry, frozen=True, kw_only=True):
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

    rank: Count
    kind: Kind
    iteration: Count | None = None
    step: Count | None = None
    after_seconds: Duration | None = None
    phase: Phase = Phase.STEP
    seconds: Duration | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "phase", Phase(self.phase))
        if self.seconds is not None and self.kind.default_seconds is None:
            timed = ", ".join(kind for kind in Kind if kind.default_seconds is not None)
            raise _NoSeconds(
                f"kind {str(self.kind)!r} takes no 'seconds'; the kinds that do are: {timed}"
            )
        for name in ("seconds", "after_seconds"):
            if (value := getattr(self, name)) is not None:
                duration = as_timedelta(name, value, allow_zero=True)
                msgspec.structs.force_setattr(self, name, duration.total_seconds())

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


class RandomFaults(Entry, frozen=True, kw_only=True):
    """Random faults, reproducible by the seed.

    Attributes:
        rate_per_step: the probability of a fault at one step of one rank.
        kinds: the kinds, all equally likely.
        max_faults: the maximum number of faults per job.
        ranks: the ranks that may have faults; all by default.
    """

    seed: Count
    rate_per_step: _Share
    kinds: _Kinds
    max_faults: Count
    ranks: _Ranks | None = None

    def draw(self, moment: Moment) -> Kind | None:
        """The fault of this rank at this step of this iteration, or none."""
        if self.ranks is not None and moment.rank not in self.ranks:
            return None
        # One generator per moment: a rank's draws do not depend on other ranks.
        place = f"{self.seed}/{moment.rank}/{moment.iteration}/{moment.step}"
        generator = random.Random(place)
        return generator.choice(self.kinds) if generator.random() < self.rate_per_step else None


class Plan(Entry, frozen=True, kw_only=True):
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
        plan = read(values, cls, f"{where}plan")
        if plan == cls():
            raise ChaosError(f"{where}plan: no faults; give 'faults', 'random', or both")
        return plan

    def to_json(self) -> str:
        """The plan as `load` reads it."""
        return json.dumps(msgspec.to_builtins(self), indent=2)


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


class _NoSeconds(ChaosError, ValueError):
    """As a `ValueError`, it gets the place in a plan that is read."""


_ALLOWED: dict[str, Iterable[str]] = {
    "faults": PlannedFault.__struct_fields__,
    "random": RandomFaults.__struct_fields__,
    **{"kind": Kind, "kinds": Kind, "phase": Phase},
}


def read(values: Any, kind: type[E], where: str, **allowed: Iterable[str]) -> E:
    """The object in `values`, which were read from JSON and which errors call `where`. A
    `ChaosError` names the field, and what is allowed: beside `_ALLOWED`, `allowed`, by the field.
    """
    try:
        # A duration is a number here: as a built-in type, `timedelta` is read from no text.
        return msgspec.convert(values, kind, builtin_types=(datetime.timedelta,))
    except msgspec.ValidationError as error:
        text = str(error).replace("float | duration", "float")
        if text.startswith(("Invalid enum value", "Object contains unknown field")):
            place = re.search(r"(\w+)(\[\d+\])?`$", text.partition(" - at ")[2])
            known = {**_ALLOWED, **allowed}[place[1]] if place else kind.__struct_fields__
            text += f"; it must be one of: {', '.join(map(str, known))}"
        raise ChaosError(f"{where}: {text}") from None


def load_json(path: Path) -> Any:
    """Reads a JSON file; a `ChaosError` names the file."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ChaosError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ChaosError(f"{path}: not JSON: {error}") from error

"""The plan of one round: a job, the faults inside its ranks, and what happens to its launcher.

    {
      "seed": 7, "number": 3, "ranks": 4, "steps": 200,
      "faults": [{"rank": 1, "kind": "sigkill", "step": 40}],
      "launcher": [{"action": "stop", "step": 90}]
    }

`faults` has the entries of a fault plan (`outlast.chaos`). `launcher` has what the campaign does to
the launcher when the training has reached a step.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any

from outlast import chaos
from outlast.chaos.plan_validation import Fields, load_json
from outlast.errors import ChaosError


class Action(str, enum.Enum):
    """What happens to the launcher, which is then followed by another one; or to its host."""

    STOP = "stop"
    """SIGTERM: all ranks save after the same step, and the job exits with code 143."""
    KILL_LAUNCHER = "kill_launcher"
    """SIGKILL: all processes of the job must end, without a last save."""
    HOST_CUT_OFF = "host_cut_off"
    """A host is cut off from the others for longer than its lease, and then comes back."""
    HOST_LOST = "host_lost"
    """A host is cut off in the same way, and then loses power; a fresh host takes its place."""

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class LauncherFault:
    """An action on the launcher, once a rank has completed `step`."""

    action: Action
    step: int


OF_HOSTS = (Action.HOST_CUT_OFF, Action.HOST_LOST)
"""The actions of rounds on several hosts."""
_FEWEST_HOSTS = 3
"""Of fewer, one cannot be lost whichever it is."""

Fault = chaos.PlannedFault | LauncherFault


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """The plan of a round.

    Attributes:
        seed: of the campaign; also that of the training.
        number: of the round in the campaign.
        ranks: how many.
        steps: of the training.
        faults: inside the ranks.
        launcher: to the launcher, in the order of their steps.
    """

    seed: int
    number: int
    ranks: int
    steps: int
    faults: tuple[chaos.PlannedFault, ...] = ()
    launcher: tuple[LauncherFault, ...] = ()

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        """Those inside the ranks, and those to the launcher."""
        return (*self.faults, *self.launcher)

    @property
    def hosts(self) -> int:
        """On how many hosts the job runs: 0 if it is a job on this machine alone."""
        on_hosts = any(fault.action in OF_HOSTS for fault in self.launcher)
        return hosts_for(self.ranks) if on_hosts else 0

    def only(self, faults: list[Fault]) -> RoundPlan:
        """The same round with these of its faults."""
        return dataclasses.replace(
            self,
            faults=tuple(f for f in self.faults if f in faults),
            launcher=tuple(f for f in self.launcher if f in faults),
        )

    def to_json(self) -> str:
        """The plan as `load` reads it."""
        inside = json.loads(chaos.Plan(faults=self.faults).to_json()).get("faults", [])
        return json.dumps(
            {
                "seed": self.seed,
                "number": self.number,
                "ranks": self.ranks,
                "steps": self.steps,
                "faults": inside,
                "launcher": [{"action": f.action.value, "step": f.step} for f in self.launcher],
            },
            indent=2,
        )

    @classmethod
    def load(cls, path: Path) -> RoundPlan:
        """Reads the plan of a round.

        Raises:
            ChaosError: if it cannot be read or is invalid; names the file and the field.
        """
        values = load_json(path)
        try:
            return cls._parse(values)
        except ChaosError as error:
            raise ChaosError(f"{path}: {error}") from error

    @classmethod
    def _parse(cls, values: Any) -> RoundPlan:
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise ChaosError(f"the plan of a round has exactly these fields: {', '.join(names)}")
        numbers = {"seed": 0, "number": 0, "ranks": 1, "steps": 1}
        for name, least in numbers.items():
            value = values[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ChaosError(
                    f"field {name!r} is {value!r}; it must be an integer of at least {least}"
                )
            numbers[name] = value
        faults: tuple[chaos.PlannedFault, ...] = ()
        if values["faults"] != []:
            faults = chaos.Plan.parse({"faults": values["faults"]}).faults
        plan = cls(**numbers, faults=faults, launcher=_parse_launcher(values["launcher"]))
        plan._check_possible()
        return plan

    def _check_possible(self) -> None:
        """Checks that each fault can happen: one that never fires would be "survived"."""
        for index, fault in enumerate(self.faults):
            if fault.rank >= self.ranks:
                raise ChaosError(
                    f"faults[{index}]: field 'rank' is {fault.rank}; with {self.ranks} ranks, it "
                    f"must be less than {self.ranks}"
                )
        of_hosts = [str(fault.action) for fault in self.launcher if fault.action in OF_HOSTS]
        if of_hosts and len(of_hosts) < len(self.launcher):
            raise ChaosError(
                f"field 'launcher' has {of_hosts[0]!r} together with actions on a single launcher; "
                f"a round has only actions on hosts ({', '.join(OF_HOSTS)}) or none of them"
            )
        if of_hosts and not self.hosts:
            raise ChaosError(
                f"field 'launcher' has {of_hosts[0]!r}; {self.ranks} ranks cannot be shared "
                f"equally by {_FEWEST_HOSTS} hosts or more"
            )


def hosts_for(ranks: int) -> int:
    """How many hosts share this many ranks equally, at least three; 0 if that is not possible."""
    return next((n for n in range(_FEWEST_HOSTS, ranks + 1) if ranks % n == 0), 0)


def _parse_launcher(values: Any) -> tuple[LauncherFault, ...]:
    if not isinstance(values, list):
        raise ChaosError(f"field 'launcher' is {values!r}; it must be a list")
    entries = [
        Fields(entry, f"launcher[{index}]", ("action", "step"))
        for index, entry in enumerate(values)
    ]
    found = [LauncherFault(each.choice("action", Action), each.integer("step")) for each in entries]
    # They are taken one after the other.
    return tuple(sorted(found, key=lambda fault: fault.step))

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

import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from outlast import chaos
from outlast.chaos.plan import Count, Entry, load_json, read
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
    HOST_LEAVES = "host_leaves"
    """The launcher of a host gets SIGTERM, while a spare host waits for its ranks."""
    HOST_JOINS = "host_joins"
    """`outlast drain` has a host leave as soon as another one joins, which then does so."""
    RANK_MOVES = "rank_moves"
    """`outlast drain --rank` moves a rank to another process of its host."""

    __str__ = str.__str__


class LauncherFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An action on the launcher, once a rank has completed `step`."""

    action: Action
    step: Count


MOVES = (Action.HOST_LEAVES, Action.HOST_JOINS, Action.RANK_MOVES)
OF_HOSTS = (Action.HOST_CUT_OFF, Action.HOST_LOST, *MOVES)
"""The actions of rounds on several hosts."""
_FEWEST_HOSTS = 3
"""Of fewer, one cannot be lost whichever it is."""

Fault = chaos.PlannedFault | LauncherFault
_Some: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class RoundPlan(Entry, frozen=True, kw_only=True, omit_defaults=False):
    """The plan of a round."""

    seed: Count  # of the campaign; also that of the training
    number: Count  # of the round in the campaign
    ranks: _Some  # how many
    steps: _Some  # of the training
    faults: tuple[chaos.PlannedFault, ...] = ()  # inside the ranks
    launcher: tuple[LauncherFault, ...] = ()  # to the launcher, in the order of their steps

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        return (*self.faults, *self.launcher)

    @property
    def hosts(self) -> int:
        """On how many hosts the job runs: 0 if it is a job on this machine alone."""
        on_hosts = any(fault.action in OF_HOSTS for fault in self.launcher)
        return hosts_for(self.ranks) if on_hosts else 0

    @property
    def moves(self) -> bool:
        return any(fault.action in MOVES for fault in self.launcher)

    def only(self, faults: Sequence[Fault]) -> RoundPlan:
        return msgspec.structs.replace(
            self,
            faults=tuple(f for f in self.faults if f in faults),
            launcher=tuple(f for f in self.launcher if f in faults),
        )

    def to_json(self) -> str:
        return json.dumps(msgspec.to_builtins(self), indent=2)

    @classmethod
    def load(cls, path: Path) -> RoundPlan:
        """Reads the plan of a round; a `ChaosError` names the file and the field."""
        names = LauncherFault.__struct_fields__
        plan = read(load_json(path), cls, f"{path}: plan", action=Action, launcher=names)
        # They are taken one after the other.
        launcher = tuple(sorted(plan.launcher, key=lambda fault: fault.step))
        plan = msgspec.structs.replace(plan, launcher=launcher)
        if why := plan._impossible():
            raise ChaosError(f"{path}: {why}")
        return plan

    def _impossible(self) -> str:
        """Why a fault cannot happen: one that never fires would be "survived"."""
        for index, fault in enumerate(self.faults):
            if fault.rank >= self.ranks:
                return (
                    f"faults[{index}]: field 'rank' is {fault.rank}; with {self.ranks} ranks, it "
                    f"must be less than {self.ranks}"
                )
        of_hosts = [str(fault.action) for fault in self.launcher if fault.action in OF_HOSTS]
        if of_hosts and len(of_hosts) < len(self.launcher):
            return (
                f"field 'launcher' has {of_hosts[0]!r} together with actions on a single launcher; "
                f"a round has only actions on hosts ({', '.join(OF_HOSTS)}) or none of them"
            )
        if of_hosts and not self.hosts:
            return (
                f"field 'launcher' has {of_hosts[0]!r}; {self.ranks} ranks cannot be shared "
                f"equally by {_FEWEST_HOSTS} hosts or more"
            )
        return ""


def hosts_for(ranks: int) -> int:
    """How many hosts share this many ranks equally, at least three; 0 if that is not possible."""
    return next((n for n in range(_FEWEST_HOSTS, ranks + 1) if ranks % n == 0), 0)

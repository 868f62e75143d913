"""The size of the job after a loss: how long a restart waits for replacements, and which smaller
sizes are allowed.
"""

from __future__ import annotations

import dataclasses

from outlast.coordination.decisions.decision import Rules
from outlast.coordination.decisions.view import ViewRecord
from outlast.coordination.records import FaultRecord
from outlast.errors import RestartAbort
from outlast.inprocess.environment import Launch
from outlast.inprocess.recovery.host_protocol import GrowPolicy
from outlast.inprocess.recovery.settings import Settings, assignment_parts
from outlast.inprocess.state import State

# `outlast run` says when a rank will not be replaced. This limit is for a replacement that hangs
# before it asks to join. It is longer than the longest back-off plus a slow start of Python.
_REPLACEMENT_LIMIT_S = 600.0


def rules(settings: Settings, launch: Launch) -> tuple[Rules, float]:
    """On what decisions depend; and for how many seconds a restart is held at most."""
    size, hold_s = _hold(settings, launch)
    return Rules(
        grow=settings.grow_policy is not GrowPolicy.NEVER,
        repeated=settings.stops_repeated_faults,
        await_size=size,
        chosen_s=settings.await_replacements or 0.0,
        hosts=bool(launch.host_id),
    ), hold_s


def _hold(settings: Settings, launch: Launch) -> tuple[int, float]:
    """The number of members for which a restart is held, and for how many seconds; 0 for none.

    `AwaitReplacements` decides, if there is one. Otherwise a restart is held under `outlast run`,
    which replaces lost ranks; but not if no replacement would be admitted, or if there may be
    reserve ranks, which take over at once.
    """
    seconds = settings.await_replacements
    if seconds is not None:
        return (launch.world_size if seconds else 0), seconds
    admits = settings.grow_policy is not GrowPolicy.NEVER
    parts = assignment_parts(settings.rank_assignment)
    reserve = settings.rank_filter is not None or any(part.keeps_reserve for part in parts)
    if launch.agent and admits and not reserve:
        return launch.world_size, _REPLACEMENT_LIMIT_S
    return 0, 0.0


@dataclasses.dataclass
class SizeRequirement:
    """The smallest number of active ranks with which the function may be called again.

    Attributes:
        full: the number of active ranks at the start; 0 if this process does not know it.
        least: the requirement; 0 if there is none.
        known: whether the function has called `require`, or has got so far that it never will.
    """

    settings: Settings
    launch: Launch
    full: int = 0
    least: int = 0
    known: bool = False

    def started(self, state: State) -> None:
        """Call when this process has got its first rank."""
        if state.iteration == 0:
            self.full = state.active_world_size
        elif self.settings.rank_filter is None:
            self.full = self.launch.world_size

    def require(self, min_ranks: int | None, state: State) -> None:
        """Requires `min_ranks`. `None` requires the full size, unless `AwaitReplacements` says how
        long to wait for it.

        Raises:
            RestartAbort: if the job is too small already.
        """
        self.known = True
        if min_ranks is None:
            self.least = 0 if self.settings.await_replacements is not None else self.full
        else:
            self.least = min_ranks
        if state.active_world_size < self.least:
            raise RestartAbort(self._refusal(state.active_world_size, "", None))

    def check(self, record: ViewRecord, state: State, cause: FaultRecord | None) -> None:
        """Checks the size of the next iteration.

        Raises:
            RestartAbort: if the job would continue with too few ranks.
        """
        if record.stop is None and state.active_world_size < self.least:
            lost = [rank for rank, member in enumerate(record.slots()) if member is None]
            raise RestartAbort(self._refusal(state.active_world_size, _names(lost), cause))

    def _refusal(self, size: int, lost: str, cause: FaultRecord | None) -> str:
        first = "" if cause is None else f" ({cause.cause}; rank {cause.rank} on {cause.host})"
        what = f"{lost} lost{first} and not replaced: " if lost else ""
        job = f"the job has {size} of {max(self.full, self.least)} ranks left, and needs "
        if self.launch.agent:
            why = (
                "outlast run replaces no rank that exits with code 0, or --max-restarts allows no "
                "further replacement, or none has joined"
            )
        elif self.launch.agent_store:
            why = "torchrun replaces no single rank; `outlast run` does"
        else:
            why = "nothing replaces a lost rank here; `outlast run` does"
        return (
            f"{what}{job}{self.least}; {why}. To continue with fewer ranks, pass "
            f"min_ranks={size} to outlast.Job. To wait for replacements that you start yourself, "
            "use AwaitReplacements in the rank assignment."
        )


def _names(ranks: list[int]) -> str:
    if not ranks:
        return ""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers} was" if len(ranks) == 1 else f"ranks {numbers} were"

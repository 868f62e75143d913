"""What may happen in a simulated run, and how often."""

from __future__ import annotations

import dataclasses
import random

from outlast.inprocess.recovery.host_protocol import GrowPolicy


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What may happen. Probabilities are per step of the simulation, counts per run.

    Attributes:
        deaths, double_deaths: of main processes, and of monitors while they report one.
        suspicions: live members that are reported as lost.
        max_equal: equal faults that end the job; 0 for no limit.
        faults, leaves, aborts: exceptions that restart, that end a member, that end the job.
        joins: new processes, mostly replacements of a dead one.
        stops: requests to stop the job.
        per_host: the ranks of each host; 0 for no loss of a host.
        host_losses, new_hosts: hosts that die or are cut off, and hosts that take their places.
        launcher_losses: launchers that are lost, or lose the lead, while they report a lost host.
        moves: hosts, or ranks of a job without hosts, that are to leave in order; joiners then wait
            for a step, too.
        patient: no member returns while ranks are to leave that can, or moves are to begin.
        p_keeps: how likely a member keeps something that is saved before the job ends.
    """

    members: int = 4
    deaths: int = 3
    faults: int = 4
    joins: int = 3
    leaves: int = 1
    aborts: int = 0
    double_deaths: int = 1
    suspicions: int = 0
    stops: int = 0
    p_death: float = 0.01
    grow: GrowPolicy = GrowPolicy.AT_ONCE
    divisor: int = 1
    reserve: int = 0
    await_full: bool = False
    max_equal: int = 0
    per_host: int = 0
    host_losses: int = 0
    new_hosts: int = 0
    launcher_losses: int = 0
    p_keeps: float = 0.0
    moves: int = 0
    patient: bool = False

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """The schedule of a seed; all seeds together cover the options."""
        r = random.Random(f"schedule {seed}")
        hosts = random.Random(f"hosts {seed}")
        moves = random.Random(f"moves {seed}")
        per_host = hosts.choice([0, 0, 0, 0, 0, 1, 2, 3])
        return cls(
            members=r.randint(1, 6),
            deaths=r.randint(0, 4),
            faults=r.randint(0, 4),
            joins=r.randint(0, 4),
            leaves=r.randint(0, 2),
            aborts=int(r.random() < 0.1),
            double_deaths=r.randint(0, 2),
            suspicions=r.choice([0, 0, 0, 1, 2]),
            p_death=r.choice([0.002, 0.01, 0.05]),
            grow=r.choice(list(GrowPolicy)),
            divisor=r.choice([1, 1, 1, 2]),
            reserve=r.choice([0, 0, 1]),
            await_full=r.random() < 0.2,
            max_equal=r.choice([0, 0, 2, 0, 3]),
            per_host=per_host,
            host_losses=hosts.randint(1, 3) if per_host else 0,
            new_hosts=hosts.randint(0, 3),
            launcher_losses=hosts.randint(0, 3),
            moves=moves.choice([0, 0, 0, 1, 2, 4]),
            patient=moves.random() < 0.5,
            p_keeps=random.Random(f"keeps {seed}").choice([0.0, 0.0, 0.6, 1.0]),
        )


class Budget:
    """The events of a schedule that are left to happen in a run."""

    def __init__(self, schedule: Schedule, random: random.Random) -> None:
        self._left = dataclasses.asdict(schedule)
        self._random = random

    def left(self, what: str) -> int:
        return int(self._left[what])

    def spend(self, what: str, probability: float) -> bool:
        """Whether an event happens now; if so, one fewer is left."""
        if self._left[what] > 0 and self._random.random() < probability:
            self._left[what] -= 1
            return True
        return False

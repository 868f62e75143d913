"""What may happen to the hosts of a simulated run."""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class HostSchedule:
    """Counts are per run; durations in seconds, probabilities per message.

    Attributes:
        hosts: how many there are at first.
        crashes, pauses, cuts, leaves, joins: hosts that die, that stop and go on later, that are
            cut off from some others (also one way), that leave in order, and that come later.
        operations: of each host.
        loss, repeats, delays: of messages. `delays`: much longer than the others, so that later
            messages overtake them.
        kept: the entries of the log that are kept; few, so that snapshots are needed.
        faults_s: faults begin within this time.
    """

    hosts: int = 3
    crashes: int = 1
    pauses: int = 1
    cuts: int = 1
    leaves: int = 0
    joins: int = 1
    operations: int = 8
    loss: float = 0.0
    repeats: float = 0.0
    delays: float = 0.0
    latency_s: float = 0.01
    kept: int = 100
    faults_s: float = 12.0

    @classmethod
    def of(cls, seed: int) -> HostSchedule:
        """The schedule of a seed; all seeds together cover the options."""
        r = random.Random(f"hosts {seed}")
        if r.random() < 0.15:
            # Little else than cut links: only so a host whose log lacks nothing fails to hear.
            latency_s = r.choice([0.001, 0.02])
            return cls(r.choice([3, 4, 5]), 0, 0, 4, 0, 0, 1, latency_s=latency_s, faults_s=10.0)
        return cls(
            hosts=r.choice([2, 3, 3, 3, 4, 4, 5, 6]),
            crashes=r.choice([0, 1, 1, 2, 3]),
            pauses=r.choice([0, 1, 2, 4]),
            cuts=r.choice([0, 1, 1, 2, 3]),
            leaves=r.choice([0, 0, 0, 1, 2]),
            joins=r.choice([0, 1, 1, 2, 3]),
            operations=r.choice([1, 4, 8, 12]),
            loss=r.choice([0, 0, 0.05, 0.2]),
            repeats=r.choice([0, 0, 0.1]),
            delays=r.choice([0, 0, 0.05, 0.2]),
            latency_s=r.choice([0.001, 0.02, 0.1]),
            kept=r.choice([2, 4, 100]),
            faults_s=r.choice([2.0, 5.0, 10.0]),
        )

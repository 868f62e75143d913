"""What may happen to the hosts of a simulated run."""

from __future__ import annotations

import dataclasses
import random

from outlast.coordination.replicated.quorum import Timing


@dataclasses.dataclass(frozen=True)
class VariedTiming(Timing):
    """Other shares of the lease. No order of events may depend on the product's own: a
    simulation that never varies them shows only that they are lucky. The defaults are sparse, with
    fewer messages when nothing happens, so that runs take less time.
    """

    heartbeat_share: float = 0.2
    append_share: float = 1 / 12

    @classmethod
    def of(cls, r: random.Random, latency_s: float) -> VariedTiming:
        """Half of all runs have the defaults; the others, shares from a wide range. Elections come
        to an end only if voters begin them further apart than a message takes. A leader keeps its
        quorum if the lease of that is longer than two intervals: `tick` may find that a message is
        not due yet, and sends it in the next one.
        """
        if r.random() < 0.5:
            return cls()
        quorum_share = r.uniform(0.2, 0.45)
        return cls(
            quorum_share=quorum_share,
            spread_share=r.choice([0.1, 0.15, 0.3] if latency_s > 0.02 else [0.02, 0.1, 0.3]),
            heartbeat_share=r.choice([0.1, 0.2, 0.3]),
            append_share=min(r.choice([0.04, 0.1, 0.15]), 0.4 * quorum_share),
            retry_share=r.choice([0.05, 0.1, 0.4]),
        )


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
        disk_s: how long a configuration is on its way to the disk, at most.
        faults_s: faults begin within this time.
        timing: the durations of the protocol.
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
    disk_s: float = 0.0
    faults_s: float = 12.0
    timing: Timing = VariedTiming()

    @classmethod
    def of(cls, seed: int) -> HostSchedule:
        """The schedule of a seed; all seeds together cover the options."""
        r = random.Random(f"hosts {seed}")
        if r.random() < 0.15:
            # Little else than cut links: only so a host whose log lacks nothing fails to hear.
            latency_s = r.choice([0.001, 0.02])
            hosts = r.choice([3, 4, 5])
            plan = cls(hosts, 0, 0, 4, 0, 0, 1, latency_s=latency_s, faults_s=10.0)
        else:
            plan = cls(
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
        timing = VariedTiming.of(random.Random(f"timing {seed}"), plan.latency_s)
        disk_s = random.Random(f"disks {seed}").choice([0, 0, 0.01, 0.5, 5.0])
        return dataclasses.replace(plan, timing=timing, disk_s=disk_s)

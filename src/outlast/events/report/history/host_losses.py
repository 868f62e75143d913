"""Lost hosts: the restart that each loss caused, and since when the other hosts waited for it.

The peers of a lost host notice closed connections, often before any launcher has missed its
heartbeats. Those faults look like first causes; the loss of the host comes later in the log.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from outlast.events import Event, HostLost
from outlast.events.report.history.stretches import Stretch
from outlast.events.report.model import HostLoss, Restart

_SILENT = re.compile(r"no heartbeat for (?P<seconds>[0-9.]+) s")
_DEATHS = ("TERMINATED", "UNRESPONSIVE")


@dataclasses.dataclass(frozen=True)
class SeenLoss:
    """The loss of a host, as all launchers have recorded it.

    Attributes:
        times: when each host learned of it, by its own clock.
        silent: how long the lost host had been silent by then, in seconds.
    """

    loss: HostLoss
    times: Mapping[str, float]
    silent: float


def find_losses(events: Iterable[Event], origins: Mapping[str, float]) -> list[SeenLoss]:
    """Each lost host once."""
    records: dict[str, list[HostLost]] = {}
    for event in events:
        if isinstance(event, HostLost):
            records.setdefault(event.host_id, []).append(event)
    found = []
    for seen in records.values():
        # A fresh host with the name of the lost one learns of the loss when it joins.
        others = [event for event in seen if event.host != event.name] or seen
        times: dict[str, float] = {}
        for event in others:
            times[event.host] = min(event.time, times.get(event.host, event.time))
        first = next(event for event in others if event.time == times[event.host])
        silent = _SILENT.search(first.reason)
        loss = HostLoss(
            name=first.name,
            address=first.address,
            reason=first.reason,
            left=first.left,
            seen_by=first.host,
            at=first.time - origins[first.host],
        )
        found.append(SeenLoss(loss, times, float(silent["seconds"]) if silent else 0.0))
    return sorted(found, key=lambda each: each.loss.at)


def name_lost_hosts(
    restarts: Sequence[Restart],
    numbers: Sequence[int],
    segments: Sequence[Mapping[str, float]],
    gone: Sequence[frozenset[str]],
    losses: Iterable[SeenLoss],
) -> list[SeenLoss | None]:
    """The lost host that caused each restart.

    Args:
        numbers: the position in `segments` of the segment that each restart ended.
        segments: when each segment began, by host.
        gone: for each restart, the hosts whose members were all lost in it.
    """
    named: list[SeenLoss | None] = [None] * len(restarts)
    for each in losses:
        if each.loss.left:
            continue
        owners = [i for i, hosts in enumerate(gone) if each.loss.name in hosts]
        begun = [i for i in owners if _begun(segments[numbers[i]], each)]
        # The logs of a lost host may be missing: its members are then in no log.
        found = begun[-1:] or [
            i
            for i, number in enumerate(numbers)
            if _ended_then(segments, number, restarts[i], each)
        ]
        for i in found:
            if named[i] is None and _may_be_cause(each.loss, restarts[i]):
                named[i] = each
    return named


def waits_for_lost_hosts(
    stretches: Mapping[str, Sequence[Stretch]],
    restarts: Sequence[Restart],
    named: Sequence[SeenLoss | None],
) -> dict[str, list[Stretch]]:
    """The stretches with the time in which the ranks waited for a host that was lost: it is no
    progress, as with a hang.
    """
    causes = {
        (restart.call, restart.iteration): loss
        for restart, loss in zip(restarts, named, strict=True)
        if loss is not None and loss.silent > 0
    }

    def corrected(host: str, stretch: Stretch) -> Stretch:
        loss = causes.get((stretch.call, stretch.iteration))
        if loss is None or host not in loss.times:
            return stretch
        since = max(stretch.start, loss.times[host] - loss.silent)
        return dataclasses.replace(stretch, hung_from=min(stretch.hung_from, since))

    return {host: [corrected(host, each) for each in found] for host, found in stretches.items()}


def _begun(segment: Mapping[str, float], loss: SeenLoss) -> bool:
    """Whether the segment had begun when the loss was recorded, by the clock of any one host."""
    return any(segment[host] <= time for host, time in loss.times.items() if host in segment)


def _ended_then(
    segments: Sequence[Mapping[str, float]], number: int, restart: Restart, each: SeenLoss
) -> bool:
    """Whether the host fell silent in this segment, by the clock of the host of the fault."""
    hosts = [restart.cause.host] if restart.cause is not None else list(each.times)
    following = segments[number + 1] if number + 1 < len(segments) else {}
    return any(
        segments[number][host] <= each.times[host] - each.silent < following.get(host, float("inf"))
        for host in hosts
        if host in each.times and host in segments[number]
    )


def _may_be_cause(loss: HostLoss, restart: Restart) -> bool:
    """Whether no rank of another host failed by itself."""
    return all(
        cause.may_be_harmless
        or cause.interruption == "WORKER_FAILED"
        or (cause.host == loss.name and cause.interruption in _DEATHS and not cause.exit)
        for cause in (restart.cause, *restart.others)
        if cause is not None
    )

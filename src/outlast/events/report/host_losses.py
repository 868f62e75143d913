"""Lost hosts: the restart that each loss caused, and since when the other hosts waited for it.

The peers of a lost host notice closed connections, often before any launcher has missed its
heartbeats. Those faults look like first causes; the loss of the host comes later in the log.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from outlast.events import HostLost
from outlast.events.event import Record
from outlast.events.report.course import Course, Ended
from outlast.events.report.intervals import FOREVER, Stretch
from outlast.events.report.model import HostLoss
from outlast.events.report.run import Run, record

_SILENT = re.compile(r"no heartbeat for (?P<seconds>[0-9.]+) s")
_DEATHS = ("TERMINATED", "UNRESPONSIVE")


class SeenLoss(Record):
    """The loss of a host, as all launchers have recorded it.

    Attributes:
        times: when each host learned of it, by its own clock.
        silent: how long the lost host had been silent by then, in seconds.
    """

    loss: HostLoss
    times: Mapping[str, float]
    silent: float


def find_losses(run: Run) -> list[SeenLoss]:
    """Each lost host once."""
    records: dict[str, list[HostLost]] = {}
    for event in run.all(HostLost):
        records.setdefault(event.host_id, []).append(event)
    found = []
    for seen in records.values():
        # A fresh host with the name of the lost one learns of the loss when it joins.
        others = [event for event in seen if event.host != event.name] or seen
        times: dict[str, float] = {}
        for event in others:
            times.setdefault(event.host, event.time)
        silent = _SILENT.search(others[0].reason)
        loss = SeenLoss(
            loss=record(HostLoss, others[0], seen_by=others[0].host),
            times=times,
            silent=float(silent["seconds"]) if silent else 0.0,
        )
        found.append(loss)
    return sorted(found, key=lambda each: each.loss.at)


def name_lost_hosts(course: Course, losses: Sequence[SeenLoss]) -> list[SeenLoss | None]:
    """The lost host that caused each restart."""
    named: list[SeenLoss | None] = [None] * len(course.ended)
    for each in losses:
        if each.loss.left:
            continue
        # The last one that had begun by then on any host that saw the loss, by its own clock.
        begun = [
            i
            for i, ended in enumerate(course.ended)
            for segment in [course.segments[ended.place]]
            if each.loss.name in ended.gone
            if any(segment[host] <= time for host, time in each.times.items() if host in segment)
        ]
        # The logs of a lost host may be missing: its members are then in no log.
        found = begun[-1:] or [
            i for i, ended in enumerate(course.ended) if _ended_then(course, ended, each)
        ]
        for i in found:
            if named[i] is None and _may_be_cause(each.loss, course.ended[i]):
                named[i] = each
    return named


def waits_for_lost_hosts(
    course: Course, named: Sequence[SeenLoss | None]
) -> dict[str, list[Stretch]]:
    """The stretches with the time in which the ranks waited for a host that was lost: it is no
    progress, as with a hang.
    """
    causes = {
        (ended.restart.call, ended.restart.iteration): loss
        for ended, loss in zip(course.ended, named, strict=True)
        if loss is not None and loss.silent > 0
    }

    def corrected(host: str, stretch: Stretch) -> Stretch:
        loss = causes.get((stretch.call, stretch.iteration))
        if loss is None or host not in loss.times:
            return stretch
        since = max(stretch.start, loss.times[host] - loss.silent)
        return dataclasses.replace(stretch, hung_from=min(stretch.hung_from, since))

    return {host: [corrected(host, s) for s in found] for host, found in course.stretches.items()}


def _ended_then(course: Course, ended: Ended, each: SeenLoss) -> bool:
    """Whether the host fell silent in this segment, by the clock of the host of the fault."""
    cause, place = ended.restart.cause, ended.place
    segment = course.segments[place]
    following = course.segments[place + 1] if place + 1 < len(course.segments) else {}
    return any(
        segment[host] <= each.times[host] - each.silent < following.get(host, FOREVER)
        for host in ([cause.host] if cause is not None else each.times)
        if host in each.times and host in segment
    )


def _may_be_cause(loss: HostLoss, ended: Ended) -> bool:
    """Whether no rank of another host failed by itself."""
    return all(
        cause.may_be_harmless
        or cause.interruption == "WORKER_FAILED"
        or (cause.host == loss.name and cause.interruption in _DEATHS and not cause.exit)
        for cause in (ended.restart.cause, *ended.restart.others)
        if cause is not None
    )

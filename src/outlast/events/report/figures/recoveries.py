"""What each restart took, part by part, and the percentiles over all restarts."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from outlast.events import Event
from outlast.events.report.figures.gaps import Gap, gaps_of
from outlast.events.report.figures.goodput import restore_times
from outlast.events.report.history.stretches import Stretch
from outlast.events.report.model import Distribution, Recovery, Restart

BACK = "back"
"""From the fault until the ranks are in the function again (`Phases.total`)."""


def recoveries_of(
    stretches: Mapping[str, Sequence[Stretch]], events: Iterable[Event]
) -> dict[tuple[int, int], list[Recovery]]:
    """What each host spent the restart after an iteration on, by call and iteration: hosts with
    survivors, if there are any.
    """
    by_host: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.time):
        by_host[event.host].append(event)
    found: dict[tuple[int, int], list[Recovery]] = defaultdict(list)
    of_lost: dict[tuple[int, int], list[Recovery]] = defaultdict(list)
    for host, own in stretches.items():
        restores = restore_times(own, by_host[host])
        places = {id(stretch): place for place, stretch in enumerate(own)}
        for gap in gaps_of(own, by_host[host]):
            start, end = restores.get(places[id(gap.after)], (0.0, 0.0))
            key = gap.before.call, gap.before.iteration
            recovery = _recovery(host, gap, max(0.0, min(end, gap.after.end) - start))
            (of_lost if gap.before.host_lost else found)[key].append(recovery)
    return {**of_lost, **found}


def recovery_of(
    restart: Restart, recoveries: Mapping[tuple[int, int], Sequence[Recovery]]
) -> Recovery | None:
    """That of the host of the fault; of the slowest host if that one has none."""
    hosts = recoveries.get((restart.call, restart.iteration), ())
    fault = "" if restart.cause is None else restart.cause.host
    slowest = max(hosts, key=lambda each: each.total, default=None)
    return next((each for each in hosts if each.host == fault), slowest)


def distributions(restarts: Iterable[Restart]) -> dict[str, Distribution]:
    """The percentiles of each part over the restarts after which the ranks continued."""
    resumed = [restart for restart in restarts if restart.resumed]
    values = {BACK: [r.phases.total for r in resumed if r.phases.total is not None]}
    for field in dataclasses.fields(Recovery):
        if field.name != "host":
            known = (r.recovery for r in resumed if r.recovery is not None)
            values[field.name] = [getattr(each, field.name) for each in known]
    return {name: distribution(seconds) for name, seconds in values.items() if any(seconds)}


def distribution(seconds: Sequence[float]) -> Distribution:
    """The percentiles by nearest rank; there must be at least one value."""
    ordered = sorted(seconds)

    def percentile(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Distribution(
        count=len(ordered), p50=percentile(0.5), p99=percentile(0.99), worst=ordered[-1]
    )


def _recovery(host: str, gap: Gap, restore: float) -> Recovery:
    # Hung ranks made no progress before the stretch ended, if they had made any in it.
    hang = max(0.0, gap.before.end - max(gap.before.start, gap.before.hung_from))
    return Recovery(
        host=host,
        hang=hang,
        **gap.seconds,
        restore=restore,
        total=hang + sum(gap.seconds.values()) + restore,
    )

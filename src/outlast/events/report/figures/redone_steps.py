"""Counts the steps that each restart discarded: completed before it, and executed again after it.

A *segment* is what runs between two restarts: an iteration of a wrapped function, or the processes
that the launcher started together. The steps after the restored one, up to the last completed one,
are executed again. `Job` records which steps it has completed. Without it, each ping counts as a
step, so the number is approximate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from outlast.events import (
    CheckpointCommitted,
    CheckpointRestored,
    Event,
    Fault,
    LeftFunction,
    NothingToRestore,
    StepsDone,
)

STEPS, PINGS = "steps", "pings"


def redone_steps(
    segments: Sequence[Mapping[str, float]], events: Iterable[Event]
) -> tuple[list[int | None], str]:
    """The steps of each segment that were executed again (`None`: not known), and what the numbers
    are based on: `STEPS`, `PINGS` or an empty string.

    Args:
        segments: when each segment began, on each host.
        events: those of the whole run.
    """
    parts = _split(segments, events)
    recorded = any(isinstance(event, StepsDone) for part in parts for event in part)
    pinged = any(isinstance(e, LeftFunction) and e.pings for part in parts for e in part)
    source = STEPS if recorded else PINGS if pinged else ""
    restored = [_restored_step(part) for part in parts]
    counts: list[int | None] = []
    for number, part in enumerate(parts):
        last = _last_step(part, restored[number], source)
        later = (step for step in restored[number + 1 :] if step is not None)
        back = next(later, None)
        known = last is not None and back is not None
        counts.append(max(0, last - back) if known else None)  # type: ignore[operator]
    return counts, source if any(count is not None for count in counts) else ""


def any_restored(segments: Sequence[Mapping[str, float]], events: Iterable[Event]) -> bool:
    """Whether a restart restored a checkpoint, or found that there was none yet."""
    return any(_restored_step(part) is not None for part in _split(segments, events)[1:])


def _split(segments: Sequence[Mapping[str, float]], events: Iterable[Event]) -> list[list[Event]]:
    """The events of each segment. Those before the first one belong to the first."""
    begins: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for number, hosts in enumerate(segments):
        for host, time in hosts.items():
            begins[host].append((time, number))
    times = {}
    for host, pairs in begins.items():
        pairs.sort()
        times[host] = [time for time, _ in pairs]
    parts: list[list[Event]] = [[] for _ in segments]
    for event in events:
        if event.host in times:
            # A checkpoint belongs to the segment in which its save began.
            time = event.time - (event.seconds if isinstance(event, CheckpointCommitted) else 0.0)
            index = max(0, bisect_right(times[event.host], time) - 1)
            parts[begins[event.host][index][1]].append(event)
    return parts


def _restored_step(part: Sequence[Event]) -> int | None:
    """The step that the segment started from; `None` if it did not get that far, or has no
    checkpoints.
    """
    steps = [event.step for event in part if isinstance(event, CheckpointRestored)]
    if any(isinstance(event, NothingToRestore) for event in part):
        steps.append(0)
    return min(steps, default=None)


def _last_step(part: Sequence[Event], restored: int | None, source: str) -> int | None:
    """The last completed step of the segment; `None` if it is not known."""
    if restored is None:
        return None
    if source == STEPS:
        done = [event.last for event in part if isinstance(event, StepsDone)]
        saved = [event.step for event in part if isinstance(event, CheckpointCommitted)]
        return max(*done, *saved, restored) if done else None
    if source == PINGS:
        pings = [e.pings for e in part if isinstance(e, LeftFunction | Fault)]
        return restored + max(pings, default=0)
    return None

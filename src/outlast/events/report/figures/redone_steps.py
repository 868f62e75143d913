"""Counts the steps that each restart discarded: completed before it, and executed again after it.

A *segment* is what runs between two restarts: an iteration of a wrapped function, or the processes
that the launcher started together. The steps after the restored one, up to the last completed one,
are executed again. `Job` records which steps it has completed. Without it, each ping counts as a
step, so the number is approximate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import outlast.events as ev
from outlast.events.report.one_pass import Run

STEPS, PINGS = "steps", "pings"
_KINDS = (
    ev.CheckpointCommitted,
    ev.CheckpointRestored,
    ev.Fault,
    ev.LeftFunction,
    ev.NothingToRestore,
    ev.StepsDone,
)


def redone_steps(
    segments: Sequence[Mapping[str, float]], run: Run
) -> tuple[list[int | None], str, bool]:
    """The steps of each segment that were executed again (`None`: not known); what the numbers are
    based on (`STEPS`, `PINGS` or an empty string); and whether a restart restored a checkpoint, or
    found that there was none yet. `segments`: when each began, on each host.
    """
    parts = _split(segments, run)
    pinged = any(isinstance(e, ev.LeftFunction) and e.pings for part in parts for e in part)
    recorded = any(isinstance(e, ev.StepsDone) for part in parts for e in part)
    source = STEPS if recorded else PINGS if pinged else ""
    restored = [_restored_step(part) for part in parts]
    counts: list[int | None] = []
    for number, part in enumerate(parts):
        last = _last_step(part, restored[number], source)
        back = next((step for step in restored[number + 1 :] if step is not None), None)
        counts.append(None if last is None or back is None else max(0, last - back))
    known = any(count is not None for count in counts)
    return counts, source if known else "", any(step is not None for step in restored[1:])


def _split(segments: Sequence[Mapping[str, float]], run: Run) -> list[list[ev.Event]]:
    """The events of each segment. Those before the first one belong to the first."""
    begins: dict[str, list[tuple[float, int]]] = {}
    for number, hosts in enumerate(segments):
        for host, time in hosts.items():
            begins.setdefault(host, []).append((time, number))
    for pairs in begins.values():
        pairs.sort()
    parts: list[list[ev.Event]] = [[] for _ in segments]
    for event in run.any_of(*_KINDS):
        if pairs := begins.get(event.host, []):
            # A checkpoint belongs to the segment in which its save began.
            time = event.time - (
                event.seconds if isinstance(event, ev.CheckpointCommitted) else 0.0
            )
            place = bisect_right(pairs, (time, len(segments))) - 1
            parts[pairs[max(0, place)][1]].append(event)
    return parts


def _restored_step(part: Sequence[ev.Event]) -> int | None:
    """The step that the segment started from; `None` if it did not get that far, or has no
    checkpoints.
    """
    steps = [event.step for event in part if isinstance(event, ev.CheckpointRestored)]
    if any(isinstance(event, ev.NothingToRestore) for event in part):
        steps.append(0)
    return min(steps, default=None)


def _last_step(part: Sequence[ev.Event], restored: int | None, source: str) -> int | None:
    """The last completed step of the segment; `None` if it is not known."""
    if restored is None:
        return None
    if source == STEPS:
        done = [event.last for event in part if isinstance(event, ev.StepsDone)]
        saved = [event.step for event in part if isinstance(event, ev.CheckpointCommitted)]
        return max(*done, *saved, restored) if done else None
    if source == PINGS:
        pings = [e.pings for e in part if isinstance(e, ev.LeftFunction | ev.Fault)]
        return restored + max(pings, default=0)
    return None

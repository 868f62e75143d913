"""Goodput: divides the wall time of a host into productive time and the kinds of lost time.

Each moment belongs to the first kind that applies, so the parts add up to the wall time:

    restart   not every active rank of the host was in the function, or the host knew of a fault
    hang      from the last progress of hung ranks, or of a lost host, to the end of the iteration
    setup     from the entry into the function to the end of the restore
    saves     `save` blocked training
    redone    the state of this moment was discarded: a later restore went back to a state before it
    reduced   of the rest: the share of the ranks that the job had before, and lacked now

A restore of step S discards the time since the job's state was that of step S: since the save of S
began, or since an earlier restore of S. So redone work is measured without the times of steps.
A restore from the ranks' own state before the fault discards the steps after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

import outlast.events.types as ev
from outlast.events.report import intervals as iv
from outlast.events.report.intervals import FOREVER, Interval, Stretch
from outlast.events.report.model import HostTime, LostTime, Recovery, TimeOutside
from outlast.events.report.recoveries import GAP_EVENTS, PARTS, gaps_of
from outlast.events.report.run import Run

Save = ev.CheckpointCommitted | ev.CheckpointFailed

LIVE_SOURCES = ("live", "replica", "predecessor")
"""Sources of a restore that are no checkpoint: the state of the ranks before the fault."""


class HostAccount:
    """The time of one host. `stretches`: the productive part of each iteration on it, in order."""

    def __init__(
        self, run: Run, host: str, stretches: Sequence[Stretch], walls: Sequence[Interval]
    ) -> None:
        self._host, self._stretches, self._wall = host, stretches, iv.union(walls)
        self._starts = [each.start for each in stretches]
        self._started = run.all(ev.WorkerStarted, host=host)
        self._saves = run.all(ev.CheckpointCommitted, host=host) + run.all(
            ev.CheckpointFailed, host=host
        )
        self._restored = run.all(ev.CheckpointRestored, host=host)
        self._from_nothing = run.all(ev.NothingToRestore, host=host)
        self._steps = run.all(ev.StepsDone, host=host)
        self._pinged = [event for event in run.all(ev.LeftFunction, host=host) if event.pings]
        self._gaps = gaps_of(stretches, run.all(*GAP_EVENTS, host=host))
        self._restores = self._restore_times()

    def time(self) -> HostTime:
        wall, begin = iv.length(self._wall), self._wall[0][0] if self._wall else 0.0
        worked = iv.union((each.start, each.end) for each in self._stretches)
        outside = iv.difference(self._wall, worked)
        blocked = ((_began(e), _began(e) + e.blocked_seconds) for e in self._saves)
        layers = {
            "hang": iv.union(stretch.hang for stretch in self._stretches),
            "setup": iv.union(self._setup_times()),
            "saves": iv.union(blocked),
            "redone": iv.union(self._discarded(begin)),
        }
        lost, rest = _peel(worked, layers)
        productive, left = 0.0, rest
        for size in sorted({each.size for each in self._stretches}):
            of_size = iv.union((s.start, s.end) for s in self._stretches if s.size == size)
            productive += size * iv.length(iv.intersection(left, of_size))
            left = iv.difference(left, of_size)
        between = {
            name: iv.union(interval for gap in self._gaps for interval in gap.parts[name])
            for name in PARTS
        }
        parts, uneven = _peel(outside, between)
        started = self._started[0].time if self._started and self._wall else None
        return HostTime(
            host=self._host,
            wall_seconds=wall,
            productive_seconds=productive,
            goodput=productive / wall if wall > 0 else None,
            lost=LostTime(
                restart=iv.length(outside),
                replacements=parts["replacements"],
                **lost,
                reduced=iv.length(rest) - productive,
                restart_parts=TimeOutside(**parts, uneven=iv.length(uneven)),
            ),
            start_seconds=None if started is None else max(0.0, begin - started),
        )

    def recoveries(self) -> Iterator[tuple[Stretch, Recovery]]:
        """What the host spent each restart on, with the stretch that it ended."""
        for gap in self._gaps:
            start, end = self._restores.get(gap.after, (0.0, 0.0))
            end = min(end, self._stretches[gap.after].end)
            # The last rank begins last; the others wait for it in their restore.
            began = [
                event.time - (event.seconds if isinstance(event, ev.CheckpointRestored) else 0.0)
                for event in (*self._restored, *self._from_nothing)
                if start <= event.time <= end
            ]
            begin = min(end, max(start, *began)) if began else end
            setup, restore = max(0.0, begin - start), max(0.0, end - begin)
            yield gap.before, gap.recovery(self._host, setup, restore)

    def _place(self, time: float) -> int:
        """The position of the stretch that had begun by then; -1 before the first."""
        return bisect_right(self._starts, time) - 1

    def _restore_times(self) -> dict[int, Interval]:
        """By stretch: from its start to the end of the slowest process's first restore."""
        ends: dict[int, dict[int, float]] = defaultdict(dict)
        for event in (*self._restored, *self._from_nothing):
            times = ends[self._place(event.time)]
            times[event.pid] = min(event.time, times.get(event.pid, event.time))
        return {n: (self._starts[n], max(times.values())) for n, times in ends.items() if n >= 0}

    def _setup_times(self) -> list[Interval]:
        """From the start of each stretch to its restore. A stretch without a restore, step or save,
        if others have one, ended before its restore (or is still there).
        """
        if not self._restores:
            return []
        trained = {self._place(event.time) for event in (*self._steps, *self._pinged)}
        trained |= {self._place(_began(save)) for save in self._saves}
        unfinished = [
            (each.start, each.end)
            for number, each in enumerate(self._stretches)
            if number not in self._restores and number not in trained
        ]
        return [*self._restores.values(), *unfinished]

    def _discarded(self, begin: float) -> Iterator[Interval]:
        """The time whose state a restore discarded; `begin` is the beginning of the wall time."""
        moments = [(_began(save), save.step) for save in self._saves]
        moments += [(event.time, event.step) for event in self._restored]
        moments.sort()
        by_step: dict[int, list[float]] = defaultdict(list)
        for time, step in moments:
            by_step[step].append(time)
        restores = [(e.time - e.seconds, e.step, e.source) for e in self._restored]
        restores += [(event.time, -1, "") for event in self._from_nothing]
        for start, step, source in restores:
            if source in LIVE_SOURCES:
                yield self._beyond(step, start, moments)
            else:
                before = by_step[step][: bisect_right(by_step[step], start)]
                yield (before[-1] if before else begin, start)

    def _beyond(self, step: int, start: float, moments: Sequence[tuple[float, int]]) -> Interval:
        """The time of the completed steps, rarely more than one, after the one that a living rank
        had at `start`. No save tells when they began: they count as those before, on average.
        """
        restored = [event.time for event in (*self._restored, *self._from_nothing)]
        since_restore = max((time for time in restored if time < start), default=-FOREVER)
        done = [event for event in self._steps if since_restore <= event.time <= start]
        last = max(done, key=lambda each: each.last, default=None)
        if last is None or last.last <= step:
            return start, start
        since, first = max((m for m in moments if m[0] < last.time), default=(last.time, last.last))
        each = (last.time - since) / max(1, last.last - max(first, 0))
        return last.time - each * (last.last - step), last.time


def _peel(
    rest: list[Interval], layers: dict[str, list[Interval]]
) -> tuple[dict[str, float], list[Interval]]:
    """The seconds of each layer that no layer before it has, and what is left."""
    seconds = {}
    for name, layer in layers.items():
        seconds[name] = iv.length(iv.intersection(rest, layer))
        rest = iv.difference(rest, layer)
    return seconds, rest


def _began(save: Save) -> float:
    return save.time - save.seconds

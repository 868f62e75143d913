"""`StragglerCheck`: finds ranks that are slower than the others, from their own times of a step.

With data parallelism, all ranks wait for the slowest one, so all see the same step time. What
differs is a rank's own part of it (`own_time.py`). Where that cannot be measured, as of parameters
that FSDP2 shards on a device, the log says so once.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal

from torch import nn

from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.silent_faults.exchange import Exchange, Running, Startable
from outlast.elastic.silent_faults.own_time import OwnTime, OwnTimes, have_times
from outlast.events.emitter import Emitter
from outlast.events.types import StragglerFound
from outlast.inprocess.running_call import running_call
from outlast.system.arguments import as_int
from outlast.system.units import duration_text

log = logging.getLogger("outlast.elastic")

_DEVIATIONS = 5.0
_SCALE = 1.4826  # of the median absolute deviation: a standard deviation of normal values
_LEAST_S = 0.0005  # a smaller difference is of the scheduler, not of the rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class StragglerCheck(Startable["RunningStragglerCheck"]):
    """Compares the ranks' own times of a step.

    Pass it to `outlast.Job(checks=...)`, or `start` it in a program without `Job`.

    Attributes:
        window: the number of steps whose median counts.
        factor: a rank is slow if its median is more than so many times that of the other ranks, and
            far from it compared with how much these differ from one another.
        windows: a rank is a straggler after so many slow windows in a row.
        on_straggler: a function, called with the `StragglerFound` on every rank, in the training
            thread, not after the same step on all ranks; it may raise. Or `"move"`: the host of the
            straggler leaves a job on several hosts, as by `Job.leave`. By default there is only the
            event and the message in the log. A straggler is reported once, and again if it has
            recovered in between.
    """

    window: int = 50
    factor: float = 1.3
    windows: int = 3
    on_straggler: Callable[[StragglerFound], object] | Literal["move"] | None = None

    def __post_init__(self) -> None:
        for name in ("window", "windows"):
            object.__setattr__(self, name, as_int(name, getattr(self, name), at_least=1))
        if not self.factor > 1:
            raise ValueError(f"factor must be greater than 1, not {self.factor!r}")
        if self.on_straggler not in (None, "move") and not callable(self.on_straggler):
            raise TypeError(f"on_straggler must be a function or 'move', not {self.on_straggler!r}")

    def _run(
        self, module: nn.Module, ledger: CallLedger, emitter: Emitter, step: int
    ) -> RunningStragglerCheck:
        return RunningStragglerCheck(self, module, ledger, emitter, step)


class RunningStragglerCheck(Running):
    """The check of one rank."""

    def __init__(
        self,
        check: StragglerCheck,
        module: nn.Module,
        ledger: CallLedger,
        emitter: Emitter,
        step: int,
    ) -> None:
        self._check, self._emitter = check, emitter
        judge = SlowRanks(check.factor, check.windows)
        self._exchange = Exchange(ledger, "stragglers", judge, Window, list[StragglerFound])
        self._step = step
        is_measured = ledger.world_size > 1 and have_times(module)
        self._times = OwnTimes(module) if is_measured else None
        self._steps: list[OwnTime] = []
        self._told_of_no_times = False

    def step(self, step: int | None = None) -> None:
        """Call it after each step of the optimizer, with the number of steps so far."""
        self._step = self._step + 1 if step is None else step
        if self._times is None:
            return
        if (own := self._times.take()) is not None:
            self._steps.append(own)
        if self._step % self._check.window == 0:
            self._publish()
        for found in chain(*self._exchange.results()):
            self._report(found)
        self._times.begin()

    def close(self) -> None:
        if self._times is not None:
            self._times.close()
        self._exchange.close()

    def _publish(self) -> None:
        steps, self._steps = self._steps, []
        at = self._step
        if not steps and not self._told_of_no_times:
            self._told_of_no_times = True
            log.warning(
                "stragglers cannot be found: no gradient was computed by the backward pass of this "
                "rank in the steps up to %d (parameters sharded by FSDP on a device?)",
                at,
            )
        host = socket.gethostname()

        def record() -> Window:
            seconds = [own.seconds() for own in steps]
            return Window(at, host, statistics.median(seconds) if seconds else None)

        self._exchange.publish(record)

    def _report(self, found: StragglerFound) -> None:
        if self._exchange.rank == 0:
            log.warning("%s", describe(found, self._check.window))
            self._emitter.emit(found)
        if callable(self._check.on_straggler):
            self._check.on_straggler(found)
        elif self._check.on_straggler == "move" and found.straggler == self._exchange.rank:
            call = running_call()
            if call is not None and call.launch.host_id:
                call.ask_to_leave("it is a straggler")
            else:
                log.warning("this host does not leave, as there is no other one in the job")


@dataclasses.dataclass(frozen=True)
class Window:
    """What one rank publishes about a window that has ended after `step`."""

    step: int
    host: str
    median: float | None  # of its own times of a step, in seconds; `None` if it has none


def describe(found: StragglerFound, window: int) -> str:
    """A straggler in a sentence."""
    times = found.seconds / found.typical_seconds
    return (
        f"rank {found.straggler} on {found.straggler_host} is a straggler after step {found.step}: "
        f"{duration_text(found.seconds)} for its own part of a step, {times:.1f} times the "
        f"{duration_text(found.typical_seconds)} of the other ranks, in {found.windows} windows of "
        f"{window} steps in a row"
    )


class SlowRanks:
    """Judges one window after the other; keeps how many in a row each rank was slow."""

    def __init__(self, factor: float, windows: int) -> None:
        self._factor, self._windows = factor, windows
        self._in_a_row: Counter[int] = Counter()

    def __call__(self, windows: Sequence[Window]) -> list[StragglerFound]:
        """The new stragglers; `windows` are those of the ranks."""
        medians = {
            rank: window.median for rank, window in enumerate(windows) if window.median is not None
        }
        found: list[StragglerFound] = []
        for rank, seconds in medians.items():
            others = [each for other, each in medians.items() if other != rank]
            typical = statistics.median(others) if others else math.inf
            if not self._is_slow(seconds, typical, others):
                self._in_a_row.pop(rank, None)
                continue
            self._in_a_row[rank] += 1
            if self._in_a_row[rank] == self._windows:
                found.append(
                    StragglerFound(
                        step=windows[rank].step,
                        straggler=rank,
                        straggler_host=windows[rank].host,
                        seconds=seconds,
                        typical_seconds=typical,
                        windows=self._windows,
                    )
                )
        return found

    def _is_slow(self, seconds: float, typical: float, others: Sequence[float]) -> bool:
        """Compared with `typical`, the median of the others, and how far these are from it."""
        above = seconds - typical
        if above <= _LEAST_S or seconds <= self._factor * typical:
            return False
        spread = statistics.median(abs(each - typical) for each in others)
        return above > _DEVIATIONS * _SCALE * spread

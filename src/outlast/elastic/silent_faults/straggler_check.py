"""`StragglerCheck`: finds ranks that are slower than the others, from their own times of a step.

With data parallelism, all ranks wait for the slowest one, so all see the same step time. What
differs is a rank's *own* time: from the end of a step to the moment when its own gradients are
complete, a torch hook of the parameter whose gradient comes last. What is waited for other ranks in
between, as in DDP's broadcast of the buffers, is not part of it (`waits.py`). On a device, the two
moments are events on the training stream, which are read when the window ends.

Where parameters are sharded (FSDP2), no hook of a shard is called. On the CPU, torch waits for all
collectives in `Work.wait`: the own time then ends when the last wait of the step begins, that of
the gradients. On a device there are no times, and the log says so once.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.silent_faults.exchange import Exchange, Running, Startable
from outlast.elastic.silent_faults.waits import Moments, Waits
from outlast.events.emitter import Emitter
from outlast.events.types import StragglerFound
from outlast.system.arguments import as_int
from outlast.system.devices import on_accelerator
from outlast.system.streams import current_stream
from outlast.system.units import duration_text

__all__ = ["RunningStragglerCheck", "StragglerCheck"]

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
        on_straggler: called with the `StragglerFound` on every rank, in the training thread, not
            after the same step on all ranks; it may raise. By default there is only the event and
            the message in the log. A straggler is reported once, and again if it has recovered in
            between.
    """

    window: int = 50
    factor: float = 1.3
    windows: int = 3
    on_straggler: Callable[[StragglerFound], object] | None = None

    def __post_init__(self) -> None:
        for name in ("window", "windows"):
            object.__setattr__(self, name, as_int(name, getattr(self, name), at_least=1))
        if not self.factor > 1:
            raise ValueError(f"factor must be greater than 1, not {self.factor!r}")
        if self.on_straggler is not None and not callable(self.on_straggler):
            raise TypeError(f"on_straggler must be a function, not {self.on_straggler!r}")

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
        self._alone = ledger.world_size == 1
        self._exchange = Exchange(ledger, "stragglers", SlowRanks(check.factor, check.windows))
        self._step = step
        parameters = [p for p in module.parameters() if p.requires_grad and p.is_leaf]
        # All of one device: no time passes between events of two.
        device = next((p.device for p in parameters if on_accelerator(p)), None)
        self._now: Callable[[], Any] = (
            time.perf_counter if device is None else partial(_device_moment, device)
        )
        # Only on the CPU are all waits of FSDP seen.
        self._is_sharded = device is None and any(isinstance(p, DTensor) for p in parameters)
        self._waits = None if self._alone else Waits(self._now)
        timed = () if self._alone else parameters
        self._last_of_backward = _LastGradient(timed, self._now, self._waits)
        self._began: Any = None
        self._steps: list[_OwnTime] = []
        self._told_of_no_times = False

    def step(self, step: int | None = None) -> None:
        """Call it after each step of the optimizer, with the number of steps so far."""
        self._step = self._step + 1 if step is None else step
        if self._alone:
            return
        last = self._last_of_backward.take()
        if self._is_sharded and self._waits is not None and self._last_of_backward.is_silent:
            last = self._waits.before_last()
        if self._began is not None and last is not None:
            self._steps.append(_OwnTime(self._began, *last))
        if self._step % self._check.window == 0:
            self._publish()
        for text in self._exchange.results():
            for found in SlowRanks.decode(text):
                self._report(found)
        if self._waits is not None:
            self._waits.clear()
        self._began = self._now()

    def close(self) -> None:
        self._last_of_backward.remove()
        if self._waits is not None:
            self._waits.stop()
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

        def record() -> str:
            seconds = [own.seconds() for own in steps]
            median = statistics.median(seconds) if seconds else None
            return json.dumps({"step": at, "host": host, "median": median})

        self._exchange.publish(record)

    def _report(self, found: StragglerFound) -> None:
        if self._exchange.rank == 0:
            log.warning("%s", describe(found, self._check.window))
            self._emitter.emit(found)
        if self._check.on_straggler is not None:
            self._check.on_straggler(found)


@dataclasses.dataclass(frozen=True)
class _OwnTime:
    """A rank's own part of a step, with its waits for other ranks."""

    began: Any
    ended: Any
    waits: list[Moments]

    def seconds(self) -> float:
        waited = sum(_seconds(begun, over) for begun, over in self.waits)
        return _seconds(self.began, self.ended) - waited


class _LastGradient:
    """The moment at which the last gradient of a backward pass is complete.

    In the first steps, every parameter has a hook, to learn whose gradient comes last; then only
    that one has.
    """

    _LEARNING_STEPS = 3

    def __init__(
        self, parameters: Sequence[torch.Tensor], now: Callable[[], Any], waits: Waits | None
    ) -> None:
        self._now, self._waits = now, waits
        self._moment: tuple[Any, list[Moments]] | None = None
        self._last: torch.Tensor | None = None
        self._left = self._LEARNING_STEPS
        self._hooks = [p.register_post_accumulate_grad_hook(self._learn) for p in parameters]

    @property
    def is_silent(self) -> bool:
        """Whether no hook has been called."""
        return self._last is None and self._left == self._LEARNING_STEPS

    def take(self) -> tuple[Any, list[Moments]] | None:
        """The moment in the ended step, and waits before it; `None` if none, or while learning."""
        moment, self._moment = self._moment, None
        if self._left and self._last is not None:
            self._left -= 1
            if self._left == 0:
                self.remove()
                self._hooks = [self._last.register_post_accumulate_grad_hook(self._note)]
                self._last = None
            return None
        return moment

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _learn(self, parameter: torch.Tensor) -> None:
        self._last = parameter
        if self._waits is not None:  # on a device, autograd has a thread of its own
            self._waits.threads.add(threading.get_ident())

    def _note(self, parameter: torch.Tensor) -> None:
        # With gradient accumulation, the last of several backward passes counts.
        self._moment = self._now(), [] if self._waits is None else self._waits.so_far()


def _device_moment(device: torch.device) -> Any:
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def _seconds(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


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

    def __call__(self, texts: Sequence[str]) -> str:
        """The new stragglers, as `decode` reads them; `texts` are the records of the ranks."""
        records = [json.loads(text) for text in texts]
        medians = {
            rank: float(record["median"])
            for rank, record in enumerate(records)
            if record["median"] is not None
        }
        found: list[dict[str, Any]] = []
        for rank, seconds in medians.items():
            typical = _typical(rank, medians)
            if typical is None or not self._is_slow(seconds, *typical):
                self._in_a_row.pop(rank, None)
                continue
            self._in_a_row[rank] += 1
            if self._in_a_row[rank] == self._windows:
                straggler = {"straggler": rank, "straggler_host": records[rank]["host"]}
                times = {"seconds": seconds, "typical_seconds": typical[0]}
                at = {"step": records[rank]["step"], "windows": self._windows}
                found.append(at | straggler | times)
        return json.dumps(found)

    @staticmethod
    def decode(text: str) -> list[StragglerFound]:
        """The stragglers of a result."""
        return [StragglerFound(**each) for each in json.loads(text)]

    def _is_slow(self, seconds: float, typical: float, spread: float) -> bool:
        above = seconds - typical
        return (
            seconds > self._factor * typical
            and above > _DEVIATIONS * _SCALE * spread
            and above > _LEAST_S
        )


def _typical(rank: int, medians: dict[int, float]) -> tuple[float, float] | None:
    """The median of the other ranks, and the median absolute deviation from it."""
    others = [seconds for other, seconds in medians.items() if other != rank]
    if not others:
        return None
    center = statistics.median(others)
    return center, statistics.median(abs(seconds - center) for seconds in others)

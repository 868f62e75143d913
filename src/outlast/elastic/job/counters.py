"""The counters of a job: steps, samples and time, which are part of its checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from outlast.elastic.job.parts import Part
from outlast.errors import CheckpointMismatch
from outlast.events.emitter import Emitter
from outlast.events.types import StepsDone
from outlast.system.arguments import as_int

_UNKNOWN = -1  # as saved in a checkpoint
# An event for every step would be too many, and one at the end is not written by a killed process.
_EVERY_S = 10.0


class Counters(Part):
    """The caller of a step says how many samples it had, or the loader counts: in `trained`, which
    only grows, or by what `done()` returns for the last batch. Without either, the count is
    unknown: a number that lacks some steps would be wrong.

    After `clean_step`, the replicas are known to have been equal. A checkpoint contains one copy of
    them: where it was loaded, they are equal.
    """

    def __init__(self, loader: Any) -> None:
        self.steps = self.clean_step = 0
        self.seconds = self._noted_s = 0.0  # until the state that was restored, and the last step
        self._since = time.monotonic()
        self._loader, self._samples = loader, 0
        self._before = getattr(loader, "trained", 0)

    @property
    def samples(self) -> int:
        """Over all ranks and since the first run; a `ValueError` if it is unknown."""
        if self.known_samples is None:
            loader = "no loader" if self._loader is None else f"a {type(self._loader).__name__}"
            raise ValueError(
                f"job.samples is unknown: a step was made with {loader}, which does not count "
                "samples, and without job.step(samples=...), the samples of the step on all ranks"
            )
        return self._samples

    @property
    def known_samples(self) -> int | None:
        return None if self._samples == _UNKNOWN else self._samples

    def add_samples(self, samples: int | None) -> None:
        """Adds those of one step; `None` if the caller did not say how many."""
        self._noted_s = self._now_s
        counted: int | None = self._loader.done() if hasattr(self._loader, "done") else None
        if hasattr(self._loader, "trained"):
            before, self._before = self._before, int(self._loader.trained)
            counted = self._before - before
        if samples is not None:
            counted = as_int("samples", samples, at_least=0)
        if counted is None or self._samples == _UNKNOWN:
            self._samples = _UNKNOWN
        else:
            self._samples += counted

    def save(self) -> dict[str, Any]:
        return {"steps": self.steps, "samples": self._samples, "seconds": self._now_s}

    @property
    def _now_s(self) -> float:
        return self.seconds + time.monotonic() - self._since

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        self.steps = steps
        self.clean_step = int(state.get("clean_step", steps))
        self._samples = max(int(state["samples"]), _UNKNOWN)
        self._before = getattr(self._loader, "trained", 0)
        self.seconds, self._since = float(state["seconds"]), time.monotonic()
        self._noted_s = self.seconds

    def shared(self) -> dict[str, Any]:
        """With the time of the last step: the same until the next one."""
        return {**self.save(), "seconds": self._noted_s, "clean_step": self.clean_step}

    def live(self, shared: Any, own: Mapping[int, Any], trusted: bool) -> Any:
        return shared

    @staticmethod
    def saved(shared: Any, own: Mapping[int, Any]) -> Any:
        return {name: value for name, value in shared.items() if name != "clean_step"}


def steps_of(state: Any) -> int:
    """The steps in counters, maybe of other programs: an error names a missing or wrong one."""
    for name in ("steps", "samples", "seconds"):
        value = state.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointMismatch(
                f"'counters.{name}' of the state is {value!r}, and not a number: it was not saved "
                "by a Job, or was changed since"
            )
    return int(state["steps"])


class StepEvents:
    """Writes to the event log which steps a rank has completed, for the goodput of the report."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._first = self._last = self._written = 0
        self._due = emitter.clock.now() + _EVERY_S
        self._cpu = time.thread_time()

    def begin(self, step: int) -> None:
        """Starts to count after `step`, which was restored."""
        self.write()
        self._first = self._last = step
        self._cpu = time.thread_time()
        self._written = -1  # that no step was completed since is worth an event too

    def completed(self, step: int) -> None:
        self._last = step
        if self._emitter.clock.now() >= self._due:
            self.write()

    def write(self) -> None:
        """Writes an event, unless the last one said the same."""
        self._due = self._emitter.clock.now() + _EVERY_S
        if self._last != self._written:
            self._written = self._last
            cpu = max(0.0, time.thread_time() - self._cpu)
            self._emitter.emit(StepsDone(first=self._first, last=self._last, cpu_seconds=cpu))

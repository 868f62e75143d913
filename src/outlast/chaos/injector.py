"""Fires the faults of a plan when their moment comes, each one once in the whole job.

As an observer of the restart wrapper it learns where the rank is from the entry into the function
and from its pings. In a loop of one's own, call `Injector.step`. Faults that go by time alone are
seen to by a thread as well, since a rank that is busy or blocked does not ping; only those kinds,
though, that mean the same in any thread.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from outlast.chaos.actions import fire
from outlast.chaos.environment import Environment
from outlast.chaos.fired import FiredFaults, MarkerDirectory, job_directory
from outlast.chaos.kinds import Kind
from outlast.chaos.plan import Moment, Plan, PlannedFault
from outlast.clock import Clock, MonotonicClock

__all__ = ["Call", "Injector"]

log = logging.getLogger(__name__)


class CallState(Protocol):
    """What an injector asks of a call's state."""

    @property
    def rank(self) -> int:
        """The rank in this iteration."""
        ...


class Call(Protocol):
    """What an injector asks of the wrapper's call that it observes."""

    @property
    def iteration(self) -> int:
        """Of the restart wrapper."""
        ...

    @property
    def state(self) -> CallState:
        """Of this rank."""
        ...

    @property
    def monitor_pid(self) -> int | None:
        """The rank's monitor process."""
        ...


class Injector:
    """Fires the faults of a plan in this process.

    A step is the number of pings in this iteration, until the script gives its own by `step`.

    Args:
        plan: which faults; a sequence of `fail_at(...)` will do.
        rank: of this process, where neither an observed call nor `step` tells it.
        clock: what `after_seconds` is counted on, from now.
        fired: the faults of the job that have fired; by default the markers of this job, which
            outlive its processes.
        action: does a fault; `outlast.chaos.fire` by default.
    """

    def __init__(
        self,
        plan: Plan | Sequence[PlannedFault],
        *,
        rank: int | None = None,
        clock: Clock | None = None,
        fired: FiredFaults | None = None,
        action: Callable[..., None] = fire,
    ) -> None:
        self.plan = plan if isinstance(plan, Plan) else Plan(faults=tuple(plan))
        self._clock: Clock = MonotonicClock() if clock is None else clock
        environment = Environment.read()
        self.fired: FiredFaults = (
            MarkerDirectory(job_directory(environment)) if fired is None else fired
        )
        self._action = action
        self._start = self._clock.now()
        self._rank = environment.rank if rank is None else rank
        self._iteration = 0
        self._step = 0
        self._own_steps = False  # the script gives them, pings are no steps
        self._monitor_pid: int | None = None
        self._closed = threading.Event()
        self._timer: threading.Thread | None = None

    # ------------------------------------------------------------------- where the rank is

    def step(self, step: int, *, rank: int | None = None, iteration: int | None = None) -> None:
        """The script is at `step`, as it counts them; fires what is due.

        Rank and iteration stay what they were, if they are not given.

        Raises:
            ChaosError: a planned exception; other faults raise what they must.
            ValueError: if the rank is not known from anywhere.
        """
        self._own_steps = True
        self._rank = self._rank if rank is None else rank
        if self._rank is None:
            raise ValueError("rank is not known: give it, or set RANK in the environment")
        self._iteration = self._iteration if iteration is None else iteration
        self._step = step
        self._fire_due(a_step=True)

    def entered(self, call: Call) -> None:
        """The rank enters the training function: an observer's method."""
        self._rank = call.state.rank
        self._iteration = call.iteration
        self._monitor_pid = call.monitor_pid
        self._step = 0
        self._fire_due(a_step=False)

    def pinged(self, call: Call, pings: int) -> None:
        """The rank made progress, for the `pings`th time: an observer's method."""
        self._monitor_pid = call.monitor_pid
        if not self._own_steps:
            self._step = pings
        self._fire_due(a_step=not self._own_steps)

    # ------------------------------------------------------------------------------- timer

    def start_timer(self) -> None:
        """Starts the thread for faults that go by time, if the plan has any that it may fire."""
        timed = [f for f in self.plan.faults if f.after_seconds is not None]
        if self._timer is None and any(not fault.kind.needs_main_thread for fault in timed):
            self._timer = threading.Thread(
                target=self._keep_time, name="outlast-chaos-timer", daemon=True
            )
            self._timer.start()

    def close(self) -> None:
        """Ends the timer thread. Nothing fires by itself afterwards."""
        self._closed.set()
        if self._timer is not None and self._timer is not threading.current_thread():
            self._timer.join()

    def _keep_time(self) -> None:
        moments = {
            fault.after_seconds: None
            for fault in self.plan.faults
            if fault.after_seconds is not None and not fault.kind.needs_main_thread
        }
        for seconds in sorted(moments):
            while (left := seconds - self._seconds()) > 0:
                if self._closed.wait(left):
                    return
            # What waits for a step or an iteration as well is left to the main thread.
            self._fire_due(a_step=False, from_timer=True)

    # ------------------------------------------------------------------------------ firing

    def _seconds(self) -> float:
        return self._clock.now() - self._start

    def _moment(self) -> Moment | None:
        if self._rank is None:
            return None
        return Moment(
            rank=self._rank, iteration=self._iteration, step=self._step, seconds=self._seconds()
        )

    def _fire_due(self, *, a_step: bool, from_timer: bool = False) -> None:
        moment = self._moment()
        if moment is None:
            return
        for index, fault in enumerate(self.plan.faults):
            mine = not (
                from_timer and (fault.after_seconds is None or fault.kind.needs_main_thread)
            )
            if mine and fault.due(moment):
                self._fire(f"planned-{index}", fault.kind, moment)
        if a_step and self.plan.random is not None:
            kind = self.plan.random.draw(moment)
            if kind is not None:
                self._fire_random(kind, moment)

    def _fire_random(self, kind: Kind, moment: Moment) -> None:
        assert self.plan.random is not None
        # One marker for the draw, which a second call of the wrapper would repeat, and one of a
        # limited number of places.
        draw = f"draw-{moment.rank}-{moment.iteration}-{moment.step}"
        if not self.fired.claim(draw, {}):
            return
        for place in range(self.plan.random.max_faults):
            if self._fire(f"random-{place}", kind, moment):
                return

    def _fire(self, key: str, kind: Kind, moment: Moment) -> bool:
        """Whether the fault was this process's to fire; seldom returns where it was."""
        taken = acting = False
        try:
            taken = self.fired.claim(key, self._record(key, kind, moment))
            if not taken:
                return False
            place = f"iteration {moment.iteration}, step {moment.step}"
            log.warning("rank %d fires %s at %s (%s)", moment.rank, kind, place, key)
            acting = True
            self._action(
                kind,
                monitor_pid=self._monitor_pid,
                message=f"a planned {kind} at {place} ({key} of the plan)",
            )
        finally:
            # A restart may interrupt this very thread; then the fault is still to come.
            if taken and not acting:
                self.fired.release(key)
        return True

    def _record(self, key: str, kind: Kind, moment: Moment) -> dict[str, Any]:
        return {
            "key": key,
            "kind": kind.value,
            "rank": moment.rank,
            "iteration": moment.iteration,
            "step": moment.step,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": self._clock.now(),
        }

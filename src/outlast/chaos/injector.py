"""Fires the faults of a plan when they are due, each once per job.

As an observer of the restart wrapper, an injector follows the rank's entries into the training
function and its pings. Without the wrapper, call `Injector.step`. A timer thread fires faults with
`after_seconds`, since a busy or blocked rank does not ping; it fires only kinds that have the same
effect in any thread.
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
from outlast.chaos.fired_faults import FiredFaults, MarkerDirectory, job_directory
from outlast.chaos.kinds import Kind
from outlast.chaos.plan import Moment, Plan, PlannedFault, RandomFaults
from outlast.clock import Clock, MonotonicClock
from outlast.system.arguments import seconds

log = logging.getLogger(__name__)


class ObservedState(Protocol):
    """The part of `inprocess.State` that an injector reads."""

    @property
    def rank(self) -> int: ...


class ObservedCall(Protocol):
    """The part of `inprocess.CallWrapper` that an injector reads."""

    @property
    def iteration(self) -> int: ...
    @property
    def state(self) -> ObservedState: ...
    @property
    def monitor_pid(self) -> int | None: ...


class Injector:
    """Fires the faults of a plan in this process.

    The step is the number of pings in this iteration, until the script reports its own with `step`.

    Args:
        plan: the plan, or a sequence of `fail_at(...)`.
        rank: the rank of this process, if neither an observed call nor `step` gives it.
        clock: the clock of `after_seconds`, which counts from now.
        fired: the record of fired faults; by default the markers of this job, which outlive its
            processes.
        action: injects a fault; `outlast.chaos.fire` by default.
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
        self._own_steps = False  # the script reports steps; pings do not count
        self._monitor_pid: int | None = None
        self._closed = threading.Event()
        self._timer: threading.Thread | None = None

    def step(self, step: int, *, rank: int | None = None, iteration: int | None = None) -> None:
        """Reports the script's current step, and fires the faults that are due.

        Rank and iteration are unchanged if they are not given.

        Raises:
            ChaosError: a planned exception; other kinds of fault raise other exceptions.
            ValueError: if the rank is unknown.
        """
        self._own_steps = True
        self._rank = self._rank if rank is None else rank
        if self._rank is None:
            raise ValueError("the rank is unknown: pass rank, or set RANK in the environment")
        self._iteration = self._iteration if iteration is None else iteration
        self._step = step
        self._fire_due(is_step=True)

    def entered(self, call: ObservedCall) -> None:
        """Observer method: the rank enters the training function."""
        self._rank = call.state.rank
        self._iteration = call.iteration
        self._monitor_pid = call.monitor_pid
        self._step = 0
        self._fire_due(is_step=False)

    def pinged(self, call: ObservedCall, pings: int) -> None:
        """Observer method: the rank made progress, `pings` times so far."""
        self._monitor_pid = call.monitor_pid
        if not self._own_steps:
            self._step = pings
        self._fire_due(is_step=not self._own_steps)

    def start_timer(self) -> None:
        """Starts the timer thread, if the plan has faults that it may fire."""
        if self._timer is None and any(map(_timer_may_fire, self.plan.faults)):
            self._timer = threading.Thread(
                target=self._run_timer, name="outlast-chaos-timer", daemon=True
            )
            self._timer.start()

    def close(self) -> None:
        """Ends the timer thread."""
        self._closed.set()
        if self._timer is not None and self._timer is not threading.current_thread():
            self._timer.join()

    def _run_timer(self) -> None:
        faults = filter(_timer_may_fire, self.plan.faults)
        for after in sorted({seconds(fault.after_seconds or 0.0) for fault in faults}):
            while (left := after - self._seconds()) > 0:
                if self._closed.wait(left):
                    return
            # A fault that also has a step or an iteration may not be due: the main thread fires it.
            self._fire_due(is_step=False, from_timer=True)

    def _seconds(self) -> float:
        return self._clock.now() - self._start

    def _fire_due(self, *, is_step: bool, from_timer: bool = False) -> None:
        if self._rank is None:
            return
        moment = Moment(
            rank=self._rank, iteration=self._iteration, step=self._step, seconds=self._seconds()
        )
        for index, fault in enumerate(self.plan.faults):
            allowed = not from_timer or _timer_may_fire(fault)
            if allowed and fault.due(moment):
                self._fire(f"planned-{index}", fault.kind, moment)
        if is_step and self.plan.random is not None:
            self._fire_random(self.plan.random, moment)

    def _fire_random(self, faults: RandomFaults, moment: Moment) -> None:
        # One marker for the draw, which a second call of the wrapper would repeat, and one of
        # `max_faults` markers for the fault.
        draw = f"draw-{moment.rank}-{moment.iteration}-{moment.step}"
        kind = faults.draw(moment)
        if kind is None or not self.fired.claim(draw, {}):
            return
        for number in range(faults.max_faults):
            if self._fire(f"random-{number}", kind, moment):
                return

    def _fire(self, key: str, kind: Kind, moment: Moment) -> bool:
        """Claims and fires a fault; false if already claimed. Most faults do not return."""
        claimed = acting = False
        try:
            claimed = self.fired.claim(key, self._record(key, kind, moment))
            if not claimed:
                return False
            place = f"iteration {moment.iteration}, step {moment.step}"
            log.warning("rank %d fires %s at %s (%s)", moment.rank, kind, place, key)
            acting = True
            message = f"a planned {kind} at {place} ({key} of the plan)"
            self._action(kind, monitor_pid=self._monitor_pid, message=message)
        finally:
            # If a restart interrupts this thread here, the fault has not fired.
            if claimed and not acting:
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


def _timer_may_fire(fault: PlannedFault) -> bool:
    return fault.after_seconds is not None and not fault.kind.needs_main_thread

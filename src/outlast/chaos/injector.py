"""Fires the faults of a plan when they are due, each once per job.

As an observer of the restart wrapper and of checkpointers, an injector follows the rank's position
in the job, and knows in which phase the rank is; the writer processes tell it what they do
(`writer_server.py`). Without the wrapper, call `Injector.step`.

A fault that takes effect in the training thread only is left to that thread when it is due in a
phase of another thread. It fires at the next step, save or restore, and the phase is held until
then, for two seconds at most. A timer thread fires faults with `after_seconds`, since a busy or
blocked rank does not ping; it fires only kinds that have the same effect in any thread.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from outlast.chaos.actions import fire, server_of
from outlast.chaos.collectives import on_next_collective
from outlast.chaos.fired_faults import Environment, MarkerDirectory, job_directory
from outlast.chaos.kinds import Kind, Phase
from outlast.chaos.plan import Moment, Plan, PlannedFault, RandomFaults
from outlast.chaos.writer_server import PUBLISH, PUBLISHED, PUT, WRITE, WriterServer
from outlast.clock import Clock, MonotonicClock
from outlast.errors import ChaosError
from outlast.system.arguments import seconds
from outlast.system.parallel import start_thread

if TYPE_CHECKING:
    from outlast.inprocess import CallWrapper

log = logging.getLogger(__name__)

_HOLD_S = 2.0  # how long a phase of another thread waits for the training thread
_OPERATIONS: dict[str, tuple[Phase, Sequence[Kind]]] = {
    WRITE: (Phase.WRITING, tuple(Kind)),
    PUT: (Phase.COMMITTING, tuple(kind for kind in Kind if kind.is_of_storage)),
    PUBLISH: (Phase.COMMITTING, tuple(kind for kind in Kind if not kind.is_of_storage)),
    PUBLISHED: (Phase.COMMITTED, tuple(Kind)),
}
"""The phase of an operation of a writer, and the kinds that fire then."""


class Injector:
    """Fires the faults of a plan in this process.

    The step is the script's own if it reports any with `step`; otherwise the one that `Job.step`
    has completed; otherwise the number of pings in this iteration.

    Args:
        plan: the plan, or a sequence of `fail_at(...)`.
        rank: the rank of this process, if neither an observed call nor `step` gives it.
        clock: the clock of `after_seconds`, which counts from now.
        fired: the record of fired faults; by default the markers of this job, which outlive its
            processes.
        action: injects a fault; `outlast.chaos.fire` by default.

    Attributes:
        writers: the writer processes, once started, if the plan has faults that need them.
    """

    def __init__(
        self,
        plan: Plan | Sequence[PlannedFault],
        *,
        rank: int | None = None,
        clock: Clock | None = None,
        fired: MarkerDirectory | None = None,
        action: Callable[..., None] = fire,
    ) -> None:
        self.plan = plan if isinstance(plan, Plan) else Plan(faults=tuple(plan))
        self._clock: Clock = MonotonicClock() if clock is None else clock
        environment = Environment.read()
        self.fired = MarkerDirectory(job_directory(environment)) if fired is None else fired
        self._start = self._clock.now()
        self._rank = environment.rank if rank is None else rank
        self._action = action
        self._store_port = environment.store_port
        self._spent: set[str] = set()  # the keys of faults known to have fired
        self._monitor_pid: int | None = None
        self.writers: WriterServer | None = None
        self._iteration = 0
        self._step = 0
        self._step_before = 0  # the last one of the iteration before
        self._own_steps = False  # the script reports steps: those of the job do not count
        self._job_steps = False  # the job reports steps: pings do not count
        self._closed = threading.Event()
        self._timer: threading.Thread | None = None
        # Faults that other threads have left to the training thread, with the event that they
        # wait for.
        self._left: dict[int, tuple[Moment, threading.Event]] = {}
        self._error: ChaosError | None = None  # of a fault that another thread could not fire
        self._withdraw: Callable[[], None] | None = None

    # ------------------------------------------------------------- the position of the rank

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
        self._await_collective()

    def entered(self, call: CallWrapper) -> None:
        self._rank = call.state.rank
        self._iteration = call.iteration
        self._monitor_pid = call.monitor_pid
        self._step, self._step_before = 0, self._step
        self._fire_due(phase=Phase.ENTRY)
        self._fire_due()
        self._await_collective()

    def pinged(self, call: CallWrapper, pings: int) -> None:
        self._monitor_pid = call.monitor_pid
        counts = not self._own_steps and not self._job_steps
        if counts:
            self._step = pings
        self._fire_due(is_step=counts)
        self._await_collective()

    def trained(self, step: int, completed: bool) -> None:
        """Observer function: `Job.step` has completed this step. A step that was only saved says
        nothing about those between.
        """
        if completed and not self._own_steps:
            self._job_steps = True
            self._step = step
            self._fire_due(is_step=True)
            self._await_collective()

    def recovering(self, iteration: int, rank: int) -> None:
        if self._withdraw is not None:
            self._withdraw()  # the training function has ended
        self._rank, self._iteration = rank, iteration
        self._fire_due(phase=Phase.RECOVERY)

    def saving(self) -> None:
        self._fire_due(phase=Phase.SAVE)

    def restoring(self) -> None:
        # At the beginning of an iteration, its own steps have not been reported.
        step, self._step = self._step, max(self._step, self._step_before)
        try:
            self._fire_due(phase=Phase.RESTORE)
        finally:
            self._step = step

    def committing(self) -> None:
        """Observer method: rank 0 commits a checkpoint, while this rank waits."""
        self._fire_due(phase=Phase.COMMITTING, elsewhere=True)

    def _writer_reached(self, operation: str) -> None:
        # Of a commit, faults of storage hit the manifest; others come when it is durable.
        phase, kinds = _OPERATIONS[operation]
        self._fire_due(phase=phase, elsewhere=True, kinds=kinds)

    # ------------------------------------------------------------------------- its threads

    def start(self) -> None:
        """Starts the threads that the plan needs: the timer, and those of the writers."""
        if self._timer is None and any(map(_timer_may_fire, self.plan.faults)):
            self._timer = start_thread("outlast-chaos-timer", self._run_timer)
        if self.writers is None and _needs_writers(self.plan):
            self.writers = WriterServer(self._clock, self._writer_reached)

    def close(self) -> None:
        self._closed.set()
        if self._withdraw is not None:
            self._withdraw()
        if self._timer is not None and self._timer is not threading.current_thread():
            self._timer.join()
        if self.writers is not None:
            self.writers.close()

    def _run_timer(self) -> None:
        faults = filter(_timer_may_fire, self.plan.faults)
        for after in sorted({seconds(fault.after_seconds or 0.0) for fault in faults}):
            while (left := after + self._start - self._clock.now()) > 0:
                if self._closed.wait(left):
                    return
            # A fault that also has a step or an iteration may not be due: the main thread fires it.
            self._fire_due(from_timer=True)

    # ------------------------------------------------------------------------------ firing

    def _moment(self, rank: int, phase: Phase) -> Moment:
        return Moment(
            rank=rank,
            iteration=self._iteration,
            step=self._step,
            seconds=self._clock.now() - self._start,
            phase=phase,
        )

    def _fire_due(
        self,
        *,
        phase: Phase = Phase.STEP,
        is_step: bool = False,
        from_timer: bool = False,
        elsewhere: bool = False,
        kinds: Sequence[Kind] = tuple(Kind),
    ) -> None:
        """Fires what is due in this phase. `elsewhere`: not in the training thread."""
        if self._rank is None:
            return
        if not from_timer and not elsewhere:
            self._fire_left()
        moment = self._moment(self._rank, phase)
        for index, fault in enumerate(self.plan.faults):
            allowed = fault.kind in kinds and (not from_timer or _timer_may_fire(fault))
            if not allowed or not fault.due(moment):
                continue
            if elsewhere and fault.kind.needs_main_thread:
                self._leave(index, moment)
            elif elsewhere or from_timer:
                self._fire_elsewhere(index, moment)
            else:
                self._fire(f"planned-{index}", fault.kind, moment, fault)
        if is_step and self.plan.random is not None:
            self._fire_random(self.plan.random, moment)

    def _leave(self, index: int, moment: Moment) -> None:
        if index not in self._left and f"planned-{index}" not in self._spent:
            fires = threading.Event()
            self._left[index] = moment, fires
            fires.wait(_HOLD_S)

    def _fire_elsewhere(self, index: int, moment: Moment) -> None:
        """Fires a fault in a thread in which nothing could handle an error."""
        fault = self.plan.faults[index]
        try:
            self._fire(f"planned-{index}", fault.kind, moment, fault)
        except ChaosError as error:
            self._error = error  # the fault is impossible: raised in the training thread

    def _fire_left(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        for index, (moment, fires) in tuple(self._left.items()):
            fires.set()
            fault = self.plan.faults[index]
            # Once only, even if it does not return. It stays in `_left`: it is not left again.
            self._fire(f"planned-{index}", fault.kind, moment, fault)

    def _await_collective(self) -> None:
        """Fires a fault of the phase `collective` in the next one, if one is due then."""
        if self._withdraw is None and any(self._due_in_collective()):
            self._withdraw = on_next_collective(self._in_collective)

    def _due_in_collective(self) -> Iterator[tuple[int, Moment]]:
        for index, fault in enumerate(self.plan.faults):
            # First what costs least: this is done at every step.
            if fault.phase is not Phase.COLLECTIVE or f"planned-{index}" in self._spent:
                continue
            if self._rank is not None:
                moment = self._moment(self._rank, Phase.COLLECTIVE)
                if fault.due(moment):
                    yield index, moment

    def _in_collective(self) -> None:
        self._withdraw = None
        for index, moment in tuple(self._due_in_collective()):
            fault = self.plan.faults[index]
            if fault.kind.needs_main_thread:
                self._fire(f"planned-{index}", fault.kind, moment, fault)
            else:
                # Its thread runs as soon as the collective releases the GIL.
                start_thread("outlast-chaos-collective", self._fire_elsewhere, index, moment)

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

    def _fire(
        self, key: str, kind: Kind, moment: Moment, fault: PlannedFault | None = None
    ) -> bool:
        """Claims and fires a fault; false if already claimed. Most faults do not return."""
        if key in self._spent:
            return False
        if kind.needs_writer and (self.writers is None or not self.writers.connected):
            return False  # not yet: a writer process is started with the first save
        lasts = None if fault is None or fault.seconds is None else seconds(fault.seconds)
        store = kind is Kind.STORE_FROZEN and self._store_port is not None
        claimed = acting = False
        try:
            record = {
                "key": key,
                "kind": kind.value,
                "rank": moment.rank,
                "iteration": moment.iteration,
                "step": moment.step,
                "phase": moment.phase.value,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "time": self._clock.now(),
            }
            claimed = self.fired.claim(key, record)
            if not claimed:
                self._spent.add(key)
                return False
            place = f"iteration {moment.iteration}, step {moment.step}"
            if moment.phase is not Phase.STEP:
                place += f", in phase {moment.phase}"
            log.warning("rank %d fires %s at %s (%s)", moment.rank, kind, place, key)
            store_pid = server_of(self._store_port or 0) if store else None
            acting = True
            self._spent.add(key)
            self._action(
                kind,
                monitor_pid=self._monitor_pid,
                message=f"a planned {kind} at {place} ({key} of the plan)",
                seconds=lasts,
                writers=self.writers,
                store_pid=store_pid,
            )
        finally:
            # If a restart interrupts this thread here, the fault has not fired.
            if claimed and not acting:
                self.fired.release(key)
        return True


def _timer_may_fire(fault: PlannedFault) -> bool:
    timed = fault.after_seconds is not None and fault.phase is Phase.STEP
    return timed and not fault.kind.needs_main_thread


def _needs_writers(plan: Plan) -> bool:
    phases = {phase for phase, _ in _OPERATIONS.values()}
    kinds = () if plan.random is None else plan.random.kinds
    return any(kind.needs_writer for kind in kinds) or any(
        fault.kind.needs_writer or fault.phase in phases for fault in plan.faults
    )

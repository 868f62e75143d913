"""The launcher's process: handles signals and worker exits, decides what follows, and exits last.

Its phases::

    RUNNING ----- a failure that restarts all workers --------> RESTARTING
    RESTARTING -- all workers and their helpers have ended ---> RUNNING
    RUNNING ----- a failure that ends the job, or a signal ---> ENDING
    RESTARTING -- a signal -----------------------------------> ENDING
    RUNNING, ENDING -- all workers have ended ----------------> ENDING_HELPERS
    ENDING_HELPERS -- all helpers have ended -----------------> FLUSHING
    FLUSHING ---- all output is written ----------------------> OVER

Everything happens in one thread, one callback of the event loop at a time, so two decisions cannot
race. The only race is between the end of a worker and other processes' writes to the store: the
job's state is read after the launcher has seen the end, and is therefore at least as new as the
state that the dead worker knew.
"""

from __future__ import annotations

import enum
import functools
import signal
import time

from outlast.clock import Clock
from outlast.errors import NO_RESTART
from outlast.events import StopRequested
from outlast.launch.agent import death_log
from outlast.launch.agent.death_log import DeathLog, Ending
from outlast.launch.agent.decisions import TOLD_TO_STOP, Decision, JobRecord, JobState
from outlast.launch.agent.replacement import Replacements
from outlast.launch.agent.resources import JobResources
from outlast.launch.agent.shutdown import Shutdown
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.config.placement import Placement
from outlast.launch.processes.descendants import (
    LINGER_S,
    ended_children,
    kill_descendants,
    kill_group,
    reap,
    terminate_group,
)
from outlast.launch.workers.worker import Worker
from outlast.system.error_text import exit_text


class Phase(enum.Enum):
    """The launcher's phase; see the module docstring."""

    RUNNING = enum.auto()
    RESTARTING = enum.auto()
    ENDING = enum.auto()
    ENDING_HELPERS = enum.auto()
    FLUSHING = enum.auto()
    OVER = enum.auto()


class Agent:
    """Runs one job, once, in the main thread of a process that does nothing else."""

    def __init__(self, job: JobSpec, *, clock: Clock | None = None) -> None:
        self._resources = JobResources(job, self._on_signal, clock)
        self._shutdown = Shutdown(self._resources, self._all_ended)
        self._deaths = DeathLog(job.max_restarts)
        self._replacements = Replacements(self._resources, self._deaths, self._replacement_lost)
        self._phase = Phase.RUNNING
        self._received: signal.Signals | None = None
        self._began = self._stopped_at = 0.0
        self._last = JobRecord()
        self._given_up: frozenset[int] = frozenset()
        self._attempt = 0

    def run(self) -> int:
        """Run the job to its end; return its exit code.

        Raises:
            LaunchError: if the job cannot be started.
        """
        with self._resources as resources:
            try:
                self._began = resources.loop.clock.now()
                self._start_all()
                while self._phase is not Phase.OVER:
                    resources.loop.run_once()
                    if self._phase is Phase.FLUSHING and not resources.console.pending:
                        self._phase = Phase.OVER
            finally:
                if self._phase is not Phase.OVER:  # a worker could not be started, or a bug here
                    kill_descendants(resources.own_children())
                    self._reap()
        cause = death_log.first_cause(self._deaths.deaths, self._last)
        return death_log.exit_code(cause, self._received)

    def _on_signal(self, number: signal.Signals) -> None:
        """Handle SIGCHLD, or a signal to the launcher: the first one ends the job (`Shutdown`)."""
        if number is signal.SIGCHLD:
            self._on_children_ended()
        elif self._phase in (Phase.RUNNING, Phase.RESTARTING):
            self._received = number
            self._resources.emitter.emit(StopRequested(reason=f"{number.name} to the launcher"))
            grace_s = self._resources.job.grace_s
            self._say(
                f"{number.name}: forwarded; workers still running after {grace_s:g} s are killed"
            )
            self._stop(Phase.ENDING, number)
        elif self._phase is Phase.FLUSHING:
            self._resources.console.drop()  # the output has no reader, and the launcher must end
        elif number is signal.SIGINT:
            self._shutdown.kill_now()
        else:
            self._resources.workers.send(number)
        self._next_phase()

    def _on_children_ended(self) -> None:
        ended = self._reap()
        self._shutdown.children_reaped()
        now = self._resources.loop.clock.now()
        # An error file has a file system time; its age, on this same host, converts it to the
        # launcher's clock.
        offset = time.time() - now
        times = death_log.failure_times(
            [(code, written and written - offset) for _, code, written in ended], now
        )
        # Of workers that failed at the same time, a killed one is the likelier cause.
        for when, _, (worker, code, _) in sorted(
            zip(times, (code >= 0 for _, code, _ in ended), ended, strict=True),
            key=lambda item: item[:2],
        ):
            if code != 0:
                self._on_failure(worker, code, when)
        self._announce_given_up()

    def _reap(self) -> list[tuple[Worker, int, float | None]]:
        """Reap the ended children; return the workers, their exit codes and error file times."""
        ended = []
        for pid, code in ended_children():
            worker = self._resources.workers.get(pid)
            if worker is not None and code != 0:
                terminate_group(pid)
                self._resources.loop.call_later(LINGER_S, functools.partial(kill_group, pid))
            reap(pid)
            if worker is None:
                self._resources.other_child_ended(pid, code)
            else:
                self._resources.workers.remove(worker, code)
                ended.append((worker, code, worker.error_time()))
        return ended

    def _on_failure(self, worker: Worker, code: int, when: float) -> None:
        if self._phase is not Phase.RUNNING:
            # This worker may have failed before the one that ended the job, and ended later.
            by_itself = self._received is None and when <= self._stopped_at
            if self._phase is Phase.ENDING and by_itself:
                death = self._deaths.record(worker, code, when, Decision.FATAL)
                self._resources.emitter.emit(death.event())
            return
        job = self._resources.store.job()
        decision = self._deaths.decide(worker, code, job)
        death = self._deaths.record(worker, code, when, decision)
        self._resources.emitter.emit(death.event())
        what = f"rank {death.rank} (pid {death.pid}) {exit_text(code)}"
        if decision is Decision.REPLACED:
            self._say(f"{what}: {self._deaths.budget(job)}")
            self._replacements.schedule(death)
        elif decision is Decision.RESTARTED:
            self._say(f"{what}: {self._deaths.budget(job)}, of all workers")
            self._stop(Phase.RESTARTING, signal.SIGTERM)
        elif decision is Decision.FATAL:
            self._say(f"{what}: this ends the job")
            self._stop(Phase.ENDING, signal.SIGTERM)
        elif decision is Decision.STOPPED:
            # The other ranks follow: one line is enough.
            if all(d is death or d.decision is not decision for d in self._deaths.deaths):
                self._say(f"{what}: it was told to stop and is not replaced")
        elif job.state is not JobState.RUNNING:
            self._say(f"{what}: not replaced, the job is {job.state.value}")
        elif job.stopping:
            self._say(f"{what}: not replaced, the job was told to stop")
        elif code == NO_RESTART:
            self._say(f"{what}: not replaced, as this code asks; the other ranks go on")
        else:
            self._say(f"{what}: not replaced, no replacement is left; the other ranks go on")

    def _announce_given_up(self) -> None:
        """Tell survivors which ranks neither run nor will be replaced; they wait for the others."""
        running = {worker.slot.rank for worker in self._resources.workers}
        ranks = frozenset(range(self._resources.job.nproc)) - running - self._replacements.ranks
        if ranks != self._given_up and self._resources.workers:
            self._given_up = ranks
            self._resources.store.give_up(ranks)

    def _replacement_lost(self) -> None:
        self._announce_given_up()
        self._next_phase()

    def _next_phase(self) -> None:
        """Start the next phase if all workers have ended."""
        phases = (Phase.RUNNING, Phase.RESTARTING, Phase.ENDING)
        if self._resources.workers or self._phase not in phases:
            return
        if self._replacements.pending and self._phase is Phase.RUNNING:
            return  # all are dead; the replacements will decide among themselves how to continue
        self._replacements.cancel()
        if self._phase is Phase.RESTARTING:
            self._shutdown.end_helpers(patient=False)
        else:
            self._phase = Phase.ENDING_HELPERS
            self._shutdown.end_helpers(patient=True)

    def _stop(self, phase: Phase, number: signal.Signals) -> None:
        self._phase = phase
        self._stopped_at = self._resources.loop.clock.now()
        self._replacements.cancel()
        self._announce_given_up()
        self._shutdown.end_workers(number)

    def _all_ended(self) -> None:
        """Called when all workers, and all processes that they started, have ended."""
        resources = self._resources
        if self._phase is Phase.RESTARTING:
            self._phase = Phase.RUNNING
            self._given_up = frozenset()
            resources.store.renew()
            self._attempt += 1
            self._start_all()
            return
        self._phase = Phase.FLUSHING
        self._last = resources.store.job()
        resources.workers.close()
        deaths = self._deaths.deaths
        codes = resources.workers.last_exit_codes.values()
        ending = Ending(
            cause=None if self._received else death_log.first_cause(deaths, self._last),
            received=self._received,
            saved=set(codes) == {TOLD_TO_STOP},
            unsaved=self._last.unsaved,
            seconds=resources.loop.clock.now() - self._began,
        )
        lines = death_log.summary(deaths, ending, resources.host)
        resources.console.say(*lines, failed=ending.failed)

    def _start_all(self) -> None:
        store = self._resources.store
        placement = Placement(store=(store.host, store.port), attempt=self._attempt)
        self._resources.workers.start_all(placement)

    def _say(self, *lines: str) -> None:
        self._resources.console.say(*lines)

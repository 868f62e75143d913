"""The launcher's process: handles signals and worker exits, decides what follows, and exits last.

Its phases::

    WAITING ----- an attempt starts here ---------------------> RUNNING
    RUNNING ----- all workers, on all hosts, are restarted ---> RESTARTING
    RESTARTING -- all workers and their helpers have ended ---> WAITING
    RUNNING ----- a failure that ends the job, or a signal ---> ENDING
    WAITING, RESTARTING -- the same --------------------------> ENDING
    RUNNING, ENDING -- all workers have ended ----------------> ENDING_HELPERS
    ENDING_HELPERS -- all helpers have ended -----------------> FINISHED
    FINISHED ---- the other hosts restart all workers --------> WAITING
    FINISHED, WAITING -- the job is over on all hosts --------> FLUSHING
    FLUSHING ---- all output is written ----------------------> OVER

On one host, WAITING and FINISHED last no time: see `coordinator`.

Everything happens in one thread, one callback of the event loop at a time, so two decisions cannot
race. The only race is between the end of a worker and other processes' writes to the store: the
job's state is read after the launcher has seen the end, and is therefore at least as new as the
state that the dead worker knew.
"""

from __future__ import annotations

import enum
import selectors
import signal
import time

from outlast.coordination.job_record import JobState
from outlast.coordination.records import process_name
from outlast.errors import NO_RESTART
from outlast.events.types import LauncherEnded, StopRequested
from outlast.launch.agent import death_log, decisions, stuck_workers
from outlast.launch.agent.coordinator import OpenCoordinator, Outcome
from outlast.launch.agent.death_log import Death
from outlast.launch.agent.death_recorder import DeathRecorder
from outlast.launch.agent.decisions import Decision, JobRecord, replacements
from outlast.launch.agent.departures import DepartedWorkers, StoppedWorkers, reap_workers
from outlast.launch.agent.last_lines import Ending, summary
from outlast.launch.agent.replacement import CallWatch, Replacements
from outlast.launch.agent.resources import JobResources
from outlast.launch.agent.shutdown import Shutdown
from outlast.launch.agent.stuck_workers import StuckWorkers
from outlast.launch.config.job_spec import JobSpec, Placement
from outlast.launch.workers.descendants import kill_descendants
from outlast.launch.workers.worker_group import Worker


class Phase(enum.Enum):
    """The launcher's phase; see the module docstring."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    RESTARTING = enum.auto()
    ENDING = enum.auto()
    ENDING_HELPERS = enum.auto()
    FINISHED = enum.auto()
    FLUSHING = enum.auto()
    OVER = enum.auto()


class Agent:
    """Runs one job, once, in the main thread of a process that does nothing else."""

    def __init__(self, job: JobSpec, coordinator: OpenCoordinator) -> None:
        self._resources = JobResources(job, coordinator, self, self._on_signal)
        self._shutdown = Shutdown(self._resources, self._all_ended)
        self._deaths: list[Death] = []
        self._replacements = Replacements(self._resources, self._deaths, self._replacement_lost)
        self._call_watch = CallWatch(self._resources)
        self._departed = DepartedWorkers(self._resources, self._on_left)
        self._stopped = StoppedWorkers(self._resources)
        self._stuck = StuckWorkers(self._resources, self._on_stuck)
        self._recorder = DeathRecorder(self._resources, self._deaths, self._call_watch)
        self._phase = Phase.WAITING
        self._received: signal.Signals | None = None
        self._began = self._stopped_at = 0.0
        self._exit_code = 1
        self._ranks = range(0)
        self._given_up: frozenset[int] = frozenset()

    def run(self) -> int:
        """Run the job to its end; return its exit code. A `LaunchError` says that it cannot be
        started.
        """
        with self._resources as resources:
            try:
                self._began = resources.loop.clock.now()
                departures = resources.departures.socket.fileno()
                resources.loop.watch(departures, selectors.EVENT_READ, self._departed.on_notice)
                self._stuck.look()
                resources.coordinator.ready()
                while self._phase is not Phase.OVER:
                    resources.loop.run_once()
                    if self._phase is Phase.FLUSHING and not resources.console.pending:
                        self._phase = Phase.OVER
            finally:
                # A worker could not be started, this host may no longer act, or a bug here.
                if self._phase is not Phase.OVER:
                    resources.workers.standbys.close()
                    kill_descendants([*resources.own_children(), *self._stuck.pids])
                    reap_workers(self._resources)
        return self._exit_code

    # ------------------------------------------------------- what the coordinator asks for

    def start(self, placement: Placement) -> None:
        self._phase = Phase.RUNNING
        self._ranks = placement.ranks(self._resources.job.nproc)
        self._given_up = frozenset()
        # A spare host has kept one for each of its ranks.
        self._resources.workers.standbys.size = self._resources.job.standby
        self._resources.workers.start_all(placement)
        self._call_watch.begin(placement)

    def park(self) -> None:
        """Wait without workers, ready to start them soon: this host is a spare."""
        job, standbys = self._resources.job, self._resources.workers.standbys
        if job.standby:
            standbys.size = job.nproc
            standbys.open()
            standbys.fill()

    def restart(self, cause: str) -> None:
        """End all workers, and call `Coordinator.ready` when no process is left."""
        if cause:
            self._say(cause)
        if self._phase is Phase.RUNNING:
            self._stop(Phase.RESTARTING, signal.SIGTERM)
            self._next_phase_soon()
        elif self._phase is Phase.ENDING_HELPERS:
            self._phase = Phase.RESTARTING
        elif self._phase is Phase.FINISHED:
            self._phase = Phase.WAITING
            self._resources.coordinator.ready()

    def stop(self, number: signal.Signals, cause: str) -> None:
        """Pass the signal to the workers, and end; a signal to another host's agent stops all."""
        self._received = number
        if self._phase in (Phase.RUNNING, Phase.RESTARTING):
            grace_s = self._resources.job.grace_s
            self._say(
                f"{cause or number.name}: forwarded; "
                f"workers still running after {grace_s:g} s are killed"
            )
        self._end(number)

    def end(self, cause: str) -> None:
        """End all workers, and the job: it has failed, on this host or another."""
        if cause:
            self._say(f"{cause}: this ends the job")
        self._end(signal.SIGTERM)

    def finish(self, outcome: Outcome) -> None:
        """The job is over on all hosts."""
        resources = self._resources
        self._phase = Phase.FLUSHING
        resources.workers.close()
        failures = self._deaths if outcome.failures is None else outcome.failures
        received = outcome.received or self._received
        cause = death_log.first_cause(failures, outcome.job)
        codes = outcome.codes.union(resources.workers.last_exit_codes.values())
        ending = Ending(
            cause=None if received else cause,
            received=received,
            # Not by the codes alone: a worker that has not reached the call is killed by the
            # signal, and takes no part in the save.
            saved=codes == {decisions.TOLD_TO_STOP} or outcome.job.saved,
            # A call that was told to stop may complete instead, with the save at its end.
            unsaved=outcome.job.unsaved and outcome.job.state is not JobState.COMPLETED,
            fault=outcome.job.fault,
            seconds=resources.loop.clock.now() - self._began,
            text=outcome.cause,
            restarts=death_log.restart_counts(self._deaths, outcome.job),
            joined_late=outcome.joined_late,
            links=outcome.links,
        )
        self._exit_code = ending.exit_code
        first = ending.first_cause(resources.host)
        lines = summary(self._deaths, ending, resources.host)
        last = "\n".join(lines)
        resources.emitter.emit(
            LauncherEnded(exit_code=self._exit_code, cause=first, last_lines=last)
        )
        if ending.failed and (kept := resources.kept_events) is not None:
            resources.console.say(f"these lines and the events: outlast report {kept}")
        resources.console.say(*lines, failed=ending.failed)

    # ------------------------------------------------------------- signals and worker exits

    def _on_signal(self, number: signal.Signals) -> None:
        """Handle SIGCHLD, or a signal to the launcher: the first one ends the job (`Shutdown`)."""
        waits = self._phase in (Phase.WAITING, Phase.FINISHED)
        if number is signal.SIGCHLD:
            self._on_children_ended()
            self._stopped.look()
        elif self._phase in (Phase.RUNNING, Phase.RESTARTING) or (waits and not self._received):
            self._resources.emitter.emit(StopRequested(reason=f"{number.name} to the launcher"))
            self._resources.coordinator.stop(number)
        elif self._phase is Phase.FLUSHING:
            self._resources.console.drop()  # the output has no reader, and the launcher must end
        elif number is signal.SIGINT:
            self._shutdown.kill_now()
        else:
            self._resources.workers.send(number)
        self._next_phase()

    def _on_children_ended(self) -> None:
        ended = reap_workers(self._resources)
        self._shutdown.children_reaped()
        now = self._resources.loop.clock.now()
        # An error file has a file system time; its age, on this same host, converts it to the
        # launcher's clock.
        offset = time.time() - now
        times = death_log.failure_times(
            [(code, written and written - offset) for _, code, written in ended], now
        )

        # By time; of those at the same time, a killed one is the likelier cause.
        order = sorted(zip(times, ended, strict=True), key=lambda one: (one[0], one[1][1] >= 0))
        for when, (worker, code, _) in order:
            if code != 0:
                self._on_failure(worker, code, when)
            elif self._phase is Phase.RUNNING:
                self._call_watch.ended(worker, code)
        self._announce_given_up()
        self._departed.look()

    def _on_left(self, worker: Worker, code: int) -> None:
        """Treat a worker as ended whose rank has left, and whose process goes on."""
        if self._phase is not Phase.RUNNING:
            return
        self._resources.workers.settle(worker, code)
        if code == 0:
            self._call_watch.ended(worker, code)
        else:
            self._on_failure(worker, code, self._resources.loop.clock.now())
        self._announce_given_up()

    def _on_stuck(self, worker: Worker, place: str) -> None:
        """Treat a worker as ended that SIGKILL does not end. No process gets its devices."""
        what = (
            f"rank {worker.rank} (pid {worker.pid}) was not ended by SIGKILL within "
            f"{stuck_workers.STUCK_S:g} s (state {place})"
        )
        self._say(f"{what}: it counts as dead")
        worker.stuck, counted = True, worker.settled
        code, now = -signal.SIGKILL, self._resources.loop.clock.now()
        self._resources.workers.remove(worker, code)
        self._resources.coordinator.leave(what)
        if self._phase is Phase.RESTARTING:
            self._recorder.record(
                worker, code, now, Decision.FATAL, self._resources.coordinator.keys.job()
            )
            self.end(what)
        elif not counted:
            self._on_failure(worker, code, now)
        self._announce_given_up()
        self._next_phase()

    def _on_failure(self, worker: Worker, code: int, when: float) -> None:
        coordinator = self._resources.coordinator
        if self._phase is not Phase.RUNNING:
            # This worker may have failed before the one that ended the job, and ended later.
            by_itself = self._received is None and when <= self._stopped_at
            if self._phase is Phase.ENDING and by_itself:
                self._recorder.record(worker, code, when, Decision.FATAL, coordinator.keys.job())
            return
        job = coordinator.keys.job()
        decision = self._decide(worker, code, job)
        death = self._recorder.record(worker, code, when, decision, job)
        what = f"{death.who()} {death.how}"
        there = f"{death.who(self._resources.host)} {death.how}"
        limit = self._resources.job.max_restarts
        if decision is Decision.REPLACED:
            first = self._recorder.first_to_fail(worker, job)
            self._say(
                f"{what}: replaced, which does not count against --max-restarts: "
                f"rank {first} had failed first"
                if first
                else f"{what}: replacement {coordinator.used} of {replacements(limit)}"
            )
            self._replacements.schedule(death, worker.holders)
        elif decision is Decision.RESTARTED:
            budget = f"restart {coordinator.used + 1} of {limit}, of all workers"
            self._say(f"{what}: {budget}")
            coordinator.restart(f"{there}: {budget}", death)
        elif decision is Decision.FATAL:
            self._say(f"{what}: this ends the job")
            coordinator.end(there, death.pid)
        elif decision is Decision.STOPPED:
            self._say_once(death, f"{what}: it was told to stop and is not replaced")
        elif job.state is JobState.ABORTED:
            self._say_once(death, "the ranks end the job")  # the last lines say why
        elif job.state is JobState.COMPLETED:
            self._say(f"{what}: not replaced, the job is completed")
        elif job.stopping:
            self._say(f"{what}: not replaced, the job was told to stop")
        elif worker.stuck:
            self._say(f"{what}: not replaced, its devices are not used again")
        elif code == NO_RESTART:
            self._say(f"{what}: not replaced, as its exit code {code} asks")
        else:
            rule = decisions.limit_text(replacements(limit), self._resources.job.restart_window_s)
            used = coordinator.used
            self._say(f"{what}: not replaced, all {used} replacements are used ({rule})")
        if decision is Decision.LOST and job.state is JobState.RUNNING:
            self._call_watch.ended(worker, code)

    def _say_once(self, death: Death, line: str) -> None:
        """Print a line for the first of the workers that end in this way."""
        if all(d is death or d.decision is not death.decision for d in self._deaths):
            self._say(line)

    def _decide(self, worker: Worker, code: int, job: JobRecord) -> Decision:
        coordinator, limit = self._resources.coordinator, self._resources.job.max_restarts
        process = process_name(coordinator.host_id, worker.pid)
        if worker.stuck:
            return decisions.decide(code, process, job, 0, 0)
        wrapped = self._resources.job.program.wrapped
        early = self._call_watch.begins_job and self._call_watch.is_early(worker, job)
        counts = not self._recorder.first_to_fail(worker, job)
        used = coordinator.used if counts else 0
        decision = decisions.decide(code, process, job, used, limit, wrapped, early)
        if decision is not Decision.REPLACED or not counts:
            return decision
        # Another host may have taken the last one.
        return decision if coordinator.take_replacement(replacements(limit)) else Decision.LOST

    def _announce_given_up(self) -> None:
        """Tell survivors which ranks neither run nor will be replaced; they wait for the others."""
        coordinator = self._resources.coordinator
        running = {worker.rank for worker in self._resources.workers if not worker.settled}
        ranks = frozenset(self._ranks) - running - self._replacements.pending
        if ranks != self._given_up and (self._resources.workers or coordinator.host_id):
            self._given_up = ranks
            coordinator.keys.give_up(ranks)

    def _replacement_lost(self) -> None:
        self._announce_given_up()
        self._next_phase()

    def _next_phase(self) -> None:
        phases = (Phase.RUNNING, Phase.RESTARTING, Phase.ENDING)
        if self._resources.workers or self._phase not in phases:
            return
        waits = bool(self._replacements.pending) and self._phase is Phase.RUNNING
        if waits and self._replacements.are_useful:
            return  # all are dead; the replacements will decide among themselves how to continue
        self._replacements.cancel()
        if self._phase is Phase.RESTARTING:
            self._shutdown.end_helpers(patient=False)
        else:
            self._phase = Phase.ENDING_HELPERS
            self._resources.workers.standbys.close()
            self._shutdown.end_helpers(patient=True)

    def _end(self, number: signal.Signals) -> None:
        if self._phase in (Phase.RUNNING, Phase.RESTARTING):
            self._stop(Phase.ENDING, number)
        elif self._phase is Phase.WAITING:
            self._phase = Phase.ENDING
        self._next_phase_soon()

    def _next_phase_soon(self) -> None:
        # Not at once: the caller may be in the middle of the deaths of one moment, all of which
        # belong to this attempt.
        self._resources.loop.call_later(0.0, self._next_phase)

    def _stop(self, phase: Phase, number: signal.Signals) -> None:
        self._phase = phase
        self._stopped_at = self._resources.loop.clock.now()
        self._replacements.cancel()
        if phase is Phase.ENDING:
            self._resources.workers.standbys.close()
        self._announce_given_up()
        self._shutdown.end_workers(number)

    def _all_ended(self) -> None:
        coordinator = self._resources.coordinator
        if self._phase is Phase.RESTARTING:
            self._phase = Phase.WAITING
            coordinator.ready()
        else:
            self._phase = Phase.FINISHED
            coordinator.finished(frozenset(self._resources.workers.last_exit_codes.values()))

    def _say(self, *lines: str) -> None:
        self._resources.console.say(*lines)

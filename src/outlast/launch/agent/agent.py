"""The launcher's process: handles signals and worker exits, decides what follows, and exits last.

Its phases are those of `phase`. Everything happens in one thread, one callback of the event loop at
a time, so two decisions cannot race. The only race is between the end of a worker and other
processes' writes to the store: the job's state is read after the launcher has seen the end, and is
therefore at least as new as the state that the dead worker knew.
"""

from __future__ import annotations

import selectors
import signal
import time

from outlast.coordination.job_record import JobState
from outlast.coordination.records import process_name
from outlast.events.types import LauncherEnded, StopRequested
from outlast.launch.agent import death_log, decisions, stuck_workers
from outlast.launch.agent.coordinator import OpenCoordinator, Outcome
from outlast.launch.agent.death_log import Death
from outlast.launch.agent.death_recorder import DeathRecorder
from outlast.launch.agent.decisions import Decision, JobRecord, replacements
from outlast.launch.agent.departures import DepartedWorkers, StoppedWorkers, reap_workers
from outlast.launch.agent.last_lines import Ending, summary
from outlast.launch.agent.phase import Phase
from outlast.launch.agent.rank_moves import RankMoves
from outlast.launch.agent.rank_requests import RankRequests
from outlast.launch.agent.replacement import CallWatch, Replacements
from outlast.launch.agent.resources import JobResources
from outlast.launch.agent.shutdown import Shutdown
from outlast.launch.agent.stuck_workers import StuckWorkers
from outlast.launch.config.job_spec import JobSpec, Placement
from outlast.launch.workers.descendants import kill_descendants
from outlast.launch.workers.worker_group import Worker


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
        self.moves = RankMoves(self._resources)
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
            requests = RankRequests(resources.job, resources.loop, self.moves.begin)
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
                requests.close()
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
        if not cause:
            self._resources.emitter.emit(StopRequested(reason=f"{number.name} to the launcher"))
        if self._phase is Phase.RUNNING:
            self._resources.coordinator.keys.request_stop(number)
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

    def depart(self, number: signal.Signals) -> None:
        """End the workers of this host; the job goes on without it."""
        self._end(number)

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
            left=outcome.left,
            left_in_order=outcome.left_in_order,
            leave_exit_code=resources.job.leave_exit_code,
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
                self._on_done(worker)
        self._announce_given_up()
        self._departed.look()

    def _on_left(self, worker: Worker, code: int) -> None:
        """Treat a worker as ended whose rank has left, and whose process goes on."""
        if self._phase is not Phase.RUNNING:
            return
        self._resources.workers.settle(worker, code)
        if code == 0:
            self._on_done(worker)
        else:
            self._on_failure(worker, code, self._resources.loop.clock.now())
        self._announce_given_up()

    def _on_done(self, worker: Worker) -> None:
        if self._resources.coordinator.leaves:
            self._say(f"rank {worker.rank} (pid {worker.pid}) has left the job")
        elif not self.moves.done(worker):
            self._call_watch.ended(worker, 0)

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
            self._recorder.record(worker, code, now, Decision.FATAL, self._job_of(worker))
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
                self._recorder.record(worker, code, when, Decision.FATAL, self._job_of(worker))
            elif self._phase is Phase.ENDING and 0 > code != -(self._received or 0):
                self._died_in_stop(worker, code, when)
            return
        if self.moves.failed(worker, code):
            return
        job = self._job_of(worker)
        decision, used = self._decide(worker, code, job)
        death = self._recorder.record(worker, code, when, decision, job)
        what = f"{death.who()} {death.how}"
        there = f"{death.who(self._resources.host)} {death.how}"
        limit = self._resources.job.max_restarts
        if decision is Decision.REPLACED:
            self._say(
                f"{what}: replaced, which does not count against --max-restarts: {job.uncounted}"
                if job.uncounted
                else f"{what}: replacement {used} of {replacements(limit)}"
            )
            if not self.moves.takes_over(worker):
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
        else:
            rule = decisions.limit_text(replacements(limit), self._resources.job.restart_window_s)
            why = decisions.why_not_replaced(code, job, coordinator.leaves, worker.stuck)
            all_used = f"all {coordinator.used} replacements are used ({rule})"
            self._say(f"{what}: not replaced, {why or all_used}")
        if decision is Decision.LOST and job.state is JobState.RUNNING:
            self._call_watch.ended(worker, code)

    def _died_in_stop(self, worker: Worker, code: int, when: float) -> None:
        """Names a worker that something else has killed than this launcher, while all ranks save.
        The others see its end, and save without it.
        """
        job = self._job_of(worker)
        if job.stopping and not self._shutdown.has_killed:
            death = self._recorder.record(worker, code, when, Decision.LOST, job)
            self._say(f"{death.who()} {death.how}: not replaced, the job was told to stop")

    def _say_once(self, death: Death, line: str) -> None:
        """Print a line for the first of the workers that end in this way."""
        if all(d is death or d.decision is not death.decision for d in self._deaths):
            self._say(line)

    def _job_of(self, worker: Worker) -> JobRecord:
        coordinator = self._resources.coordinator
        return coordinator.keys.job(worker.rank, process_name(coordinator.host_id, worker.pid))

    def _decide(self, worker: Worker, code: int, job: JobRecord) -> tuple[Decision, int]:
        """The decision, and how many replacements are used with this one."""
        coordinator, limit = self._resources.coordinator, self._resources.job.max_restarts
        process = process_name(coordinator.host_id, worker.pid)
        if worker.stuck or (coordinator.leaves and job.state is not JobState.RUNNING):
            return decisions.decide(code, process, job, 0, 0), 0
        wrapped = self._resources.job.program.wrapped
        early = self._call_watch.begins_job and self._call_watch.is_early(worker, job)
        # With a call, only the number of replacements counts, which is looked at below.
        asks = not job.uncounted and (early or job.state is JobState.PLAIN)
        used = coordinator.used if asks else 0
        decision = decisions.decide(code, process, job, used, limit, wrapped, early)
        if decision is not Decision.REPLACED:
            return decision, 0
        most = replacements(limit)
        taken = 0 if job.uncounted else coordinator.take_replacement(most, job.progress)
        lost = taken is None or not coordinator.replaces(worker.rank)
        return (Decision.LOST, 0) if taken is None or lost else (decision, taken)

    def _announce_given_up(self) -> None:
        """Tell survivors which ranks neither run nor will be replaced; they wait for the others."""
        coordinator = self._resources.coordinator
        if coordinator.leaves:
            return  # others have these ranks
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

"""The launcher's one process: sees workers end, decides what follows, and ends last.

Its phases::

    RUNNING ----- a worker fails, all are to start again -----> RESTARTING
    RESTARTING -- all workers and their helpers are gone -----> RUNNING
    RUNNING ----- a failure ends the job, or a signal --------> ENDING
    RESTARTING -- a signal -----------------------------------> ENDING
    RUNNING, ENDING -- no worker is left ---------------------> SWEEPING
    SWEEPING ---- no helper is left --------------------------> FLUSHING
    FLUSHING ---- all output is written ----------------------> OVER

Everything happens in one thread, one callback of the loop after the other, so that no two
decisions can cross. What can cross is a worker's end with what the others write to the store:
the state of the job is read after the end was seen, and so is at least as new as what the worker
itself knew.
"""

from __future__ import annotations

import enum
import functools
import signal
import time

from outlast.clock import Clock
from outlast.errors import LaunchError
from outlast.launch.agent import outcome
from outlast.launch.agent.death_log import Ledger
from outlast.launch.agent.decisions import Fate, JobRecord, JobState
from outlast.launch.agent.outcome import Death
from outlast.launch.agent.resources import Site
from outlast.launch.agent.shutdown import Ending
from outlast.launch.config.job_spec import Job
from outlast.launch.event_loop import Timer
from outlast.launch.processes.reaping import (
    LINGER_S,
    end_group,
    ended_children,
    kill_all,
    kill_group,
    reap,
)
from outlast.launch.workers.worker import Worker
from outlast.system.exit_text import exit_text

__all__ = ["Agent", "Phase"]


class Phase(enum.Enum):
    """Where the launcher is; see the module's docstring."""

    RUNNING = enum.auto()
    RESTARTING = enum.auto()
    ENDING = enum.auto()
    SWEEPING = enum.auto()
    FLUSHING = enum.auto()
    OVER = enum.auto()


class Agent:
    """Runs one job, once, in the main thread of a process that does nothing else.

    Args:
        job: what is to be run.
        clock: measures grace times and back-off.
    """

    def __init__(self, job: Job, *, clock: Clock | None = None) -> None:
        self._site = Site(job, self._on_signal, clock)
        self._ending = Ending(self._site, self._swept)
        self._ledger = Ledger(job.max_restarts)
        self._phase = Phase.RUNNING
        self._backing_off: list[tuple[Timer, Death]] = []
        self._received: signal.Signals | None = None
        self._stopped_at = 0.0
        self._last = JobRecord()

    def run(self) -> int:
        """Run the job to its end; the exit code of the job.

        Raises:
            LaunchError: if the job could not be started.
        """
        with self._site:
            try:
                self._site.crew.start_all(self._site.store.port)
                while self._phase is not Phase.OVER:
                    self._site.loop.run_once()
                    if self._phase is Phase.FLUSHING and not self._site.console.pending:
                        self._phase = Phase.OVER
            finally:
                if self._phase is not Phase.OVER:  # no room for a worker, or a defect here
                    kill_all(self._site.keep())
                    self._reap()
        return outcome.exit_code(self._ledger.cause(self._last), self._received)

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGCHLD:
            self._children_ended()
        elif self._phase in (Phase.RUNNING, Phase.RESTARTING):
            self._received = number
            grace_s = self._site.job.grace_s
            self._say(f"{number.name}: passed on; workers still there in {grace_s:g} s are killed")
            self._stop(Phase.ENDING, number)
        elif self._phase is Phase.FLUSHING:
            self._site.console.drop()  # nobody reads, and we are asked to end
        elif number is signal.SIGINT:
            self._ending.hurry()
        else:
            self._site.crew.send(number)
        self._look_around()

    def _children_ended(self) -> None:
        ended = self._reap()
        self._ending.check()
        now = self._site.loop.clock.now()
        # An error file has the time of the file system; its age, on this same host, makes it a
        # moment of the launcher's clock.
        offset = time.time() - now
        whens = outcome.moments(
            [(code, written and written - offset) for _, code, written in ended], now
        )
        # Of those that failed in the same moment, the killed one is the likelier cause.
        for when, _, (worker, code, _) in sorted(
            zip(whens, (code >= 0 for _, code, _ in ended), ended, strict=True),
            key=lambda item: item[:2],
        ):
            if code != 0:
                self._failed(worker, code, when)

    def _reap(self) -> list[tuple[Worker, int, float | None]]:
        """Reap what has ended; the workers among it, with exit code and time of the error file."""
        ended = []
        for pid, code in ended_children():
            worker = self._site.crew.get(pid)
            if worker is not None and code != 0:
                end_group(pid)
                self._site.loop.call_later(LINGER_S, functools.partial(kill_group, pid))
            reap(pid)
            if worker is None:
                self._site.other_child_ended(pid, code)
            else:
                self._site.crew.remove(worker, code)
                ended.append((worker, code, worker.error_time()))
        return ended

    def _look_around(self) -> None:
        """Go on to the next phase if no worker is left."""
        if self._site.crew or self._phase in (Phase.SWEEPING, Phase.FLUSHING, Phase.OVER):
            return
        if self._backing_off and self._phase is Phase.RUNNING:
            return  # all are dead, and newcomers decide among themselves how to go on
        self._forget_replacements()
        if self._phase is Phase.RESTARTING:
            self._ending.sweep(patient=False)
        else:
            self._phase = Phase.SWEEPING
            self._ending.sweep(patient=True)

    # ------------------------------------------------------------------------------ failures

    def _failed(self, worker: Worker, code: int, when: float) -> None:
        if self._phase is not Phase.RUNNING:
            # The failure that ends the job may have been another's, who took longer to die of it.
            by_itself = self._received is None and when <= self._stopped_at
            if self._phase is Phase.ENDING and by_itself:
                self._ledger.record(worker, code, when, Fate.FATAL)
            return
        job = self._site.store.job()
        fate = self._ledger.judge(worker, code, job)
        death = self._ledger.record(worker, code, when, fate)
        what = f"rank {death.rank} (pid {death.pid}) {exit_text(code)}"
        if fate is Fate.REPLACED:
            self._say(f"{what}: {self._ledger.budget(job)}")
            self._replace_later(death)
        elif fate is Fate.RESTARTED:
            self._say(f"{what}: {self._ledger.budget(job)}, of all workers")
            self._stop(Phase.RESTARTING, signal.SIGTERM)
        elif fate is Fate.FATAL:
            self._say(f"{what}: this ends the job")
            self._stop(Phase.ENDING, signal.SIGTERM)
        elif fate is Fate.STOPPED:
            self._say(f"{what}: it was told to stop, and is not replaced")
        else:
            self._say(f"{what}: not replaced, {self._why_not(job)}")

    def _why_not(self, job: JobRecord) -> str:
        if job.state is not JobState.RUNNING:
            return f"the job is {job.state.value}"
        return "all replacements are used, the others go on without it"

    def _replace_later(self, death: Death) -> None:
        delay_s = self._site.crew.delay_s(death.rank)
        if delay_s == 0:
            self._replace(death)
            return
        self._say(f"rank {death.rank} died soon after its start again: replaced in {delay_s:g} s")
        timer = self._site.loop.call_later(delay_s, lambda: self._replace(death))
        self._backing_off.append((timer, death))

    def _replace(self, death: Death) -> None:
        self._backing_off = [item for item in self._backing_off if item[1] is not death]
        if self._site.store.job().state is not JobState.RUNNING:
            self._ledger.lost(death)  # it was over while this one backed off
            self._look_around()
            return
        try:
            worker = self._site.crew.replace(death.rank, self._site.store.port)
        except LaunchError as e:  # the survivors are worth more than the lost one
            self._say(f"{e}: the others go on without it")
            self._ledger.lost(death)
            self._look_around()
        else:
            self._say(f"rank {death.rank} is now pid {worker.pid}")

    def _forget_replacements(self) -> None:
        for timer, death in self._backing_off:
            timer.cancel()
            self._ledger.lost(death)
        self._backing_off.clear()

    # -------------------------------------------------------------------------------- ending

    def _stop(self, phase: Phase, number: signal.Signals) -> None:
        self._phase = phase
        self._stopped_at = self._site.loop.clock.now()
        self._forget_replacements()
        self._ending.ask(number)

    def _swept(self) -> None:
        """No worker is left, and nothing that they had started."""
        if self._phase is Phase.RESTARTING:
            self._phase = Phase.RUNNING
            self._site.store.renew()
            self._site.crew.next_attempt()
            self._site.crew.start_all(self._site.store.port)
            return
        self._phase = Phase.FLUSHING
        self._last = self._site.store.job()
        self._site.crew.close()
        self._say(
            *outcome.last_lines(self._ledger.deaths, self._last, self._received, self._site.host)
        )

    def _say(self, *lines: str) -> None:
        self._site.console.say(*lines)

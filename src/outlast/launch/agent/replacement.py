"""What follows the death of a worker of a wrapped function: a replacement, at once or after a
back-off, once the memory of its device is free; or the others are told not to wait for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import psutil

from outlast.coordination.job_record import JobState
from outlast.errors import LaunchError
from outlast.launch.agent.death_log import EARLY, Death
from outlast.launch.agent.decisions import Decision, JobRecord
from outlast.launch.agent.resources import JobResources
from outlast.launch.config.job_spec import Placement
from outlast.launch.event_loop import Timer
from outlast.launch.workers import device_holders
from outlast.launch.workers.device_holders import HeldMemory
from outlast.launch.workers.worker_group import Worker
from outlast.system.error_text import exit_text

_CHECK_S = 0.5
_LOOK_S, _TELL_S = 0.05, 2.0
"""For the memory of a device: between two looks; until the user is told."""


class Replacements:
    """Replaces dead workers with new processes of the same ranks. `deaths`: of the job; corrected
    if a dead worker is not replaced after all.
    """

    def __init__(
        self, resources: JobResources, deaths: list[Death], given_up: Callable[[], None]
    ) -> None:
        self._resources, self._deaths, self._given_up = resources, deaths, given_up
        self._waiting: list[tuple[Timer, Death, HeldMemory]] = []

    @property
    def pending(self) -> frozenset[int]:
        """The ranks whose replacements wait: for their back-off, or for the memory of a device."""
        return frozenset(death.rank for _, death, _ in self._waiting)

    @property
    def are_useful(self) -> bool:
        """Whether the job still waits for its ranks: it may have ended during a back-off."""
        state = self._resources.coordinator.keys.job().state
        wrapped = self._resources.job.program.wrapped
        return state is JobState.RUNNING or (wrapped and state is JobState.PLAIN)

    def schedule(self, death: Death, holders: list[psutil.Process]) -> None:
        """Replaces a worker after its back-off, and once `holders` have left its devices."""
        memory = HeldMemory(holders, self._resources.loop.clock.now())
        delay_s = self._resources.workers.delay_s(death.local_rank)
        if delay_s == 0:
            self._await_memory(death, memory)
            return
        self._resources.console.say(
            f"rank {death.rank} died soon after its start again: replaced in {delay_s:g} s"
        )
        self._later(delay_s, death, memory)

    def cancel(self) -> None:
        for timer, death, _ in self._waiting:
            timer.cancel()
            self._lost(death)
        self._waiting.clear()

    def _later(self, seconds: float, death: Death, memory: HeldMemory) -> None:
        def due() -> None:
            self._waiting = [item for item in self._waiting if item[1] is not death]
            if self.are_useful:
                self._await_memory(death, memory)
            else:
                self._give_up(death)

        self._waiting.append((self._resources.loop.call_later(seconds, due), death, memory))

    def _await_memory(self, death: Death, memory: HeldMemory) -> None:
        """Replaces once the memory of the predecessor is free, or after a while: a replacement that
        runs out of memory would use up the next one.
        """
        limit_s = device_holders.FREE_S
        is_free, waited_s = memory.is_free, self._resources.loop.clock.now() - memory.since
        if is_free or waited_s >= limit_s:
            if not is_free:
                self._resources.console.say(
                    f"rank {death.rank}: the memory of its device is not free after {limit_s:g} s, "
                    f"held by {memory.held_by()}: replaced all the same"
                )
            self._replace(death)
            return
        if waited_s >= _TELL_S and not memory.is_told:
            memory.is_told = True
            self._resources.console.say(
                f"rank {death.rank} waits, for at most {limit_s:g} s, until the memory of its "
                f"device is free, held by {memory.held_by()}"
            )
        self._later(_LOOK_S, death, memory)

    def _replace(self, death: Death) -> None:
        resources = self._resources
        try:
            worker = resources.workers.replace(death.local_rank)
        except LaunchError as e:  # the survivors may still finish the job
            resources.console.say(f"{e}: it is not replaced")
            self._give_up(death)
            return
        standby = ", a standby process" if worker.was_standby else ""
        resources.console.say(f"rank {death.rank} is now pid {worker.pid}{standby}")

    def _give_up(self, death: Death) -> None:
        self._lost(death)
        self._given_up()

    def _lost(self, death: Death) -> None:
        lost = dataclasses.replace(death, decision=Decision.LOST)
        self._deaths[self._deaths.index(death)] = lost
        self._resources.coordinator.failed(lost)


class CallWatch:
    """Looks whether the workers have reached the wrapped function, and acts once they have.

    *Standby processes* are started then. With any other script, a failure restarts all workers, and
    standbys would save no time; and as long as the workers import their modules, standbys would
    only be in their way.

    *Workers that end and are not replaced:* the others wait for them in the call. The monitor
    process of a worker reports its end to the others, and runs from the call on. Until then, the
    launcher is the only one that knows of the end: it tells the others as soon as one of them has
    reached the call.
    """

    def __init__(self, resources: JobResources) -> None:
        self._resources = resources
        # the workers were started before any rank had reached the call: this host has not joined a
        # job that trains
        self.begins_job = False
        self._world_size = 0
        self._ended: list[tuple[Worker, int]] = []
        self._timer = Timer()

    def begin(self, placement: Placement) -> None:
        self.begins_job = self._resources.coordinator.keys.job().state is JobState.PLAIN
        self._world_size = placement.places * self._resources.job.nproc
        self._ended.clear()
        standbys = self._resources.workers.standbys
        standbys.open()
        if standbys.size:
            self._check_later()

    def is_early(self, worker: Worker, job: JobRecord) -> bool:
        """Whether the script has a wrapped function that no process of this rank has reached, by
        the record of the job for it.
        """
        if job.state is JobState.PLAIN:
            return self._resources.job.program.wrapped
        running = job.state is JobState.RUNNING and bool(job.prefix)
        return running and not job.has_come

    def ended(self, worker: Worker, exit_code: int) -> None:
        self._ended.append((worker, exit_code))
        self._check()

    def _check_later(self) -> None:
        if not self._timer.pending:
            self._timer = self._resources.loop.call_later(_CHECK_S, self._check)

    def _check(self) -> None:
        workers, standbys = self._resources.workers, self._resources.workers.standbys
        coordinator = self._resources.coordinator
        job = coordinator.keys.job()
        wants_standbys = bool(standbys.size) and not standbys.closed
        if job.state is JobState.PLAIN and ((self._ended and workers) or wants_standbys):
            self._check_later()
            return
        for worker, exit_code in self._ended:
            if workers:
                self._tell(worker, exit_code, coordinator.keys.job(worker.rank))
        self._ended.clear()
        if job.state is JobState.RUNNING:
            standbys.fill()

    def _tell(self, worker: Worker, exit_code: int, job: JobRecord) -> None:
        """Tells the user of an end with code 0, and the other ranks of one before the call."""
        early = self.is_early(worker, job)
        who = f"rank {worker.rank} (pid {worker.pid}) {exit_text(exit_code)}"
        coordinator, console = self._resources.coordinator, self._resources.console
        if early:
            if exit_code == 0:  # any other end was announced
                console.say(f"{who} {EARLY}, where the other ranks wait for it")
                coordinator.keys.give_up(frozenset({worker.rank}))
            cause = f"process {worker.pid} {exit_text(exit_code)} {EARLY}"
            coordinator.keys.will_not_come(
                job, coordinator.host_id, worker.pid, worker.rank, self._world_size, cause
            )
        elif exit_code == 0 and job.state is JobState.RUNNING and not job.stopping:
            console.say(f"{who} within the wrapped function: a rank that ends so is not replaced")

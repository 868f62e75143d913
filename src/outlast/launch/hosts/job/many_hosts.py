"""A job on many hosts: this host's coordinator, which agrees with those of the other hosts.

Each agent applies the entries of the group's chain in order (`plan`), and does what they require of
this host. An agent claims an entry when a worker of its host has failed, or when it was told to
stop. The agent of the group's leader also claims those that follow from the hosts that are there
(`decider`).

Everything here happens in the thread of the agent's event loop, and operations on the store block
it: for milliseconds, and while the group has no leader for at most the lease. A lease that is over
is a `StoreError`, which ends `Agent.run`: what is left of the workers is killed at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.coordination.blame import may_be_of_host
from outlast.coordination.records import process_name
from outlast.coordination.replicated.hosts import HostJoined, HostLost
from outlast.errors import HostUnfit, StoreError
from outlast.launch.agent.coordinator import Outcome
from outlast.launch.agent.death_log import Death
from outlast.launch.agent.decisions import Decision
from outlast.launch.agent.job_keys import JobKeys
from outlast.launch.agent.resources import JobResources
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.event_loop import Timer
from outlast.launch.hosts import plan as plans
from outlast.launch.hosts.host_entries import Check, Checked, Links, Probe, Unfit
from outlast.launch.hosts.host_group import GroupState, HostGroup
from outlast.launch.hosts.job import this_host
from outlast.launch.hosts.job.departing import Departing
from outlast.launch.hosts.job.job_log import JobLog
from outlast.launch.hosts.job.leading import GroupNotices, Leading, leaving_event, outcome_of
from outlast.launch.hosts.job.links import HostLinks
from outlast.launch.hosts.job.neighbors import HostNeighbors
from outlast.launch.hosts.places import ranks_text
from outlast.launch.hosts.plan import Entry, JobPlan, Stage

if TYPE_CHECKING:
    from outlast.launch.agent.agent import Agent

_OFTEN_S, _WAITING_S, _SELDOM_S = 0.05, 0.2, 1.0
"""Between two looks: while the leader's agent waits for reports of hosts, while it counts how long
the job waits, and otherwise. One read by one host costs less than waking a host at every report.
"""


class ManyHosts:
    """The coordinator of a job on many hosts.

    `open_group` joins the group of the backend; it returns it with the page of this host's lease,
    which is alone in its folder.
    """

    lease_page: Path | None

    def __init__(
        self,
        resources: JobResources,
        agent: Agent,
        *,
        open_group: Callable[[JobSpec], tuple[HostGroup, Path]],
    ) -> None:
        job = resources.job
        assert job.hosts is not None
        self._resources, self._agent, self._job, self._hosts = resources, agent, job, job.hosts
        self._group, self.lease_page = open_group(job)
        self._me = self._group.me
        self.host_id = self._me.id
        self._log = JobLog(
            self._group.store,
            self._me.id,
            self._me.name,
            job.restart_window_s,
            resources.loop.call_later,
        )
        clock = resources.loop.clock
        self._leading = Leading(job, job.hosts, self._log, self.keys, clock, self._say)
        self._plan = JobPlan()
        self._state = GroupState()
        self._links = HostLinks(self._log, self._me, job.hosts.lease_s, resources)
        checks = job.health is not None and job.health.checks_neighbors
        limit_s = job.health.limit_s if job.health is not None and checks else None
        self._neighbors = HostNeighbors(self._log, self._me, limit_s, resources.checks)
        self._notices: GroupNotices | None = None
        self._departing = Departing(resources, agent, self._me.id, lambda: self.keys)
        self._timer = Timer()
        self._leaves = self._leaves_alone = False
        self._no_worker_left = self._joined_late = self._over = False
        self._outcome: Outcome | None = None
        self._asked = 0  # how many of the requests to this host were passed on

    # --------------------------------------------------------------------- for the agent

    @property
    def keys(self) -> JobKeys:
        return JobKeys(self._group.workers)

    @property
    def used(self) -> int:
        return self._log.used(self._plan, self.keys.job().progress)

    @property
    def leaves(self) -> bool:
        return self._departing.began

    def replaces(self, rank: int) -> bool:
        return not self.leaves or self._departing.replaces(rank)

    def agree(self, name: str, value: str) -> str:
        return self._log.agree(name, value)

    def ready(self) -> None:
        if self._notices is None:
            self._begin()
        else:
            self._log.clear(self._plan.attempt)

    def take_replacement(self, limit: int, progress: str) -> int | None:
        return self._log.take(self._plan, progress, limit)

    def restart(self, cause: str, death: Death) -> None:
        attempt, process = self._plan.attempt, process_name(self.host_id, death.pid)
        blames = death.error is None or may_be_of_host(death.error.error)
        self._propose(
            lambda plan: (
                plans.Restart(attempt, cause, process=process, blames=blames)
                if plan.running and plan.attempt == attempt
                else None
            )
        )

    def end(self, cause: str, pid: int) -> None:
        process = process_name(self.host_id, pid)
        self._propose(lambda plan: None if plan.ends else plans.End(cause, process))

    def leave(self, reason: str) -> None:
        why = f"host {self._me} gets no more ranks: {reason}"
        self._propose(lambda plan: None if plan.ends else Unfit(self.host_id, why))

    def ask_to_leave(self, reason: str) -> None:
        self._propose_new(plans.Leave(self.host_id, reason))

    def stop(self, number: signal.Signals) -> None:
        if self._plan.place_of(self.host_id) is None and not self._plan.ends:
            self._leaves_alone = True  # it has no workers: the job goes on without this host
            self._agent.stop(number, "")
            return
        if self._departing.takes(number, self._plan):
            self._propose_new(plans.Leave(self.host_id, number.name, number))
            return
        self._propose(lambda plan: None if plan.ends else plans.Stop(number, self._me.name))

    def failed(self, death: Death) -> None:
        if death.decision in (Decision.FATAL, Decision.FAILED, Decision.LOST, Decision.STOPPED):
            self._log.fail(death)

    def finished(self, exit_codes: frozenset[int]) -> None:
        self._no_worker_left = True
        if self._leaves_alone or (self.leaves and not self._plan.ends):
            self._conclude(self._departing.outcome())
            return
        self._log.finish(self._plan.attempt, exit_codes)
        self._look()

    def close(self) -> None:
        self._timer.cancel()
        self._departing.close()
        self._links.close()
        self._neighbors.close()
        self._group.close(leave=self._over)
        assert self.lease_page is not None
        shutil.rmtree(self.lease_page.parent, ignore_errors=True)

    # ------------------------------------------------------------------ looking and deciding

    def _begin(self) -> None:
        self._notices = GroupNotices(self._say, self._resources.emitter)
        self._resources.console.say(*this_host.greeting(self._job, self._me))
        self._catch_up()
        self._departing.watch(self._hosts.leave_when, self.ask_to_leave)
        self._resources.loop.watch(self._group.wakeup_fd(), selectors.EVENT_READ, self._look)
        self._look()

    def _catch_up(self) -> None:
        """Apply the entries that were made before, and do what the last of them requires."""
        self._state = self._group.poll()
        for entry in self._state.chain:
            self._plan = self._plan.apply(entry)
            if isinstance(entry, plans.Start) and entry.attempt == 0:
                self._joined_late = self.host_id not in entry.places
        plan = self._plan
        self._tell()
        self._leave_if_unfit()
        if plan.check is not None:
            self._neighbors.check(plan.check, plan)
        if plan.running:
            self._start_attempt()
            if plan.probe is not None:
                self._links.probe(plan.probe, plan.hosts.values())
        elif plan.stage is Stage.CLEARING and plan.place_of(self.host_id) is not None:
            self._log.clear(plan.attempt)  # the attempt was over before this host has started it
        elif plan.stop is not None:
            self._agent.stop(signal.Signals(plan.stop.signal), "")
        elif plan.end is not None:
            self._agent.end(plan.end.cause)

    def _look(self) -> None:
        """Learn what is new, and decide what follows if this is the leader's agent."""
        if self._over:
            return
        self._timer.cancel()
        self._state = self._group.poll()
        if self._state.error:
            raise StoreError(self._state.error)
        while self._plan.number < len(self._state.chain):
            new = self._state.chain[self._plan.number]
            if not isinstance(new, HostJoined | HostLost):
                self._tell()  # what has led to it
            self._apply(new)
        self._tell()
        while len(self._state.asked) > self._asked:
            self._asked += 1
            self._propose_new(self._state.asked[self._asked - 1])
        leader = self._state.leader
        leads = leader == self.host_id
        while entry := self._leading.next_entry(self._plan, leader, leads=leads):
            self._claim(entry)
        if self._plan.stage is Stage.FINISHED:
            self._finish()
        self._look_later()

    def _tell(self) -> None:
        if self._notices is not None and self._plan.stage is not Stage.FINISHED:
            self._notices.changed(self._plan, self._state)

    def _look_later(self) -> None:
        stage, leads = self._plan.stage, self._state.leader == self.host_id
        waits = self._leading.waits(self._plan)
        if self._over or not (leads or waits or stage is Stage.FINISHED):
            return
        often = leads and (stage in (Stage.CLEARING, Stage.ENDING) or self._plan.probe is not None)
        if often or stage is Stage.FINISHED or self._no_worker_left:
            pause_s = _OFTEN_S
        else:
            checks = self._plan.check is not None
            pause_s = _WAITING_S if leads and (waits or checks) else _SELDOM_S
        self._timer = self._resources.loop.call_later(pause_s, self._look)

    def _propose(self, wanted: Callable[[JobPlan], Entry | None]) -> None:
        """Claim an entry for as long as it is wanted and other entries come first."""
        while (entry := wanted(self._plan)) is not None:
            if self._claim(entry):
                return

    def _propose_new(self, entry: plans.Asked) -> None:
        self._propose(lambda plan: plan.if_new(entry))

    def _claim(self, entry: Entry) -> bool:
        held = self._group.claim(self._plan.number + 1, entry)
        if held == entry and isinstance(entry, plans.Restart) and entry.counts:
            self._log.restarted(self._plan)
        self._apply(held, mine=held == entry)
        return held == entry

    # ------------------------------------------------------------------ applying entries

    def _apply(self, entry: Entry, *, mine: bool = False) -> None:
        before = self._plan
        self._plan = before.apply(entry)
        if self._plan == dataclasses.replace(before, number=self._plan.number):
            return  # it came too late, and has no meaning
        if before.check is not None and self._plan.check is None:
            self._neighbors.cancel()  # before its processes end with the workers
        match entry:
            case plans.Start():
                self._start_attempt()
            case plans.Take():
                self._take_place(entry)
            case plans.GiveUp():
                ranks = [ranks_text(place, self._job.nproc) for place in entry.places]
                self._say(
                    f"no host came in time to replace {', '.join(ranks)}: the job continues with "
                    "fewer ranks if the program allows it, and grows again when a host joins"
                )
            case Probe():
                self._links.probe(entry, self._plan.hosts.values())
            case Check():
                self._neighbors.check(entry, self._plan)
            case Links() | Checked():
                # In order: no worker is left when the agent closes this coordinator.
                self._over = self.host_id in entry.excluded
                leads = self._state.leader == self.host_id
                if isinstance(entry, Checked) and (figures := self._neighbors.take_figures()):
                    self._say(f"checked with neighbors: {figures}")
                self._links.decided(entry, self._plan.hosts.values(), leads=leads)
            case plans.Leave() | plans.Stay() | plans.Move() | plans.Return():
                self._move(entry)
            case plans.MoveRank():
                self._departing.move_rank(entry)
            case Unfit():
                self._leave_if_unfit()
                self._say(entry.reason)
            case plans.Restart():
                self._agent.restart("" if mine and entry.process else entry.cause)
            case plans.End():
                self._agent.end("" if mine and entry.process else entry.cause)
            case plans.Stop():
                number = signal.Signals(entry.signal)
                self._agent.stop(number, "" if mine else f"{number.name} to host {entry.host}")

    def _leave_if_unfit(self) -> None:
        if self.host_id in self._plan.unfit:
            self._over = True  # no worker is left when the agent closes this coordinator
            reason = self._plan.unfit[self.host_id]
            raise HostUnfit(f"{reason}. The job goes on without it; repair the host")

    def _start_attempt(self) -> None:
        plan = self._plan
        self._no_worker_left = False
        self._group.new_attempt(plan.attempt)
        place = plan.place_of(self.host_id)
        if place == 0:
            self._log.forget_before(plan.attempt - 1)
        if place is None:
            self._say(
                f"{len(plan.places)} hosts run the job; this one is a spare, and waits until a "
                "host is lost or the job ends"
            )
            self._agent.park()
            return
        self._start_workers(place)

    def _move(self, entry: plans.Leave | plans.Stay | plans.Move | plans.Return) -> None:
        plan, mine = self._plan, entry.host == self.host_id
        self._resources.emitter.emit(leaving_event(entry, plan))
        self._say(this_host.move_text(entry, plan, self._job.nproc))
        if mine:
            self._departing.decided(entry, plan)
        if isinstance(entry, plans.Move) and entry.to == self.host_id:
            self._start_workers(plan.moves[entry.host])
        if mine and plan.place_of(self.host_id) is None and not self.leaves:
            self._leaves_alone = True  # a spare has no ranks
            self._agent.depart(signal.SIGTERM)

    def _take_place(self, entry: plans.Take) -> None:
        ranks = ranks_text(entry.place, self._job.nproc)
        host = self._plan.host(entry.host).name
        self._say(f"host {host} takes place {entry.place}: {ranks}")
        if entry.host == self.host_id:
            self._start_workers(entry.place)

    def _start_workers(self, place: int) -> None:
        if self._plan.taken_over[place]:
            # Before they start, so before anything that is given up of them.
            nproc = self._job.nproc
            self.keys.take_back(range(place * nproc, (place + 1) * nproc))
        self._agent.start(this_host.placement(self._plan, self._me, place, self.lease_page))

    # ------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """The job is over on all hosts: report it when this host is ready, and leave last if this
        is the leader, because the others read the store until they have said goodbye.
        """
        if not self._no_worker_left:
            # A spare has no worker, but processes that wait to become workers.
            if self._plan.place_of(self.host_id) is None and not self._leaves:
                self._leaves = True
                self._agent.end("")
            return
        if self._outcome is None:
            # Read before the goodbye: after it, the others may leave.
            self._outcome = outcome_of(
                self._plan, self._log, self.keys, self._say, joined_late=self._joined_late
            )
            with contextlib.suppress(StoreError):
                self._log.say_goodbye()
        with contextlib.suppress(StoreError):
            others = self._plan.hosts.keys() - self._log.goodbyes()
            if self._state.leader == self.host_id and others:
                return
        self._conclude(self._outcome)

    def _conclude(self, outcome: Outcome) -> None:
        self._over = True
        self._timer.cancel()
        self._resources.loop.unwatch(self._group.wakeup_fd())
        self._agent.finish(outcome)

    def _say(self, line: str) -> None:
        self._resources.console.say(line)

"""How this host leaves a job on many hosts in order: what its launcher does for that.

The ranks leave by themselves once their successors are ready, or once this launcher has asked them
to (`JobKeys.ask_to_leave`). A signal says that the host goes away: after half of `--grace`, the
ranks do not wait for successors any longer, and save; after all of it, they are killed, and the
others go on as after the loss of a host.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from outlast.coordination.job_record import JobState
from outlast.launch.agent.agent import Agent
from outlast.launch.agent.coordinator import Outcome
from outlast.launch.agent.job_keys import JobKeys
from outlast.launch.agent.resources import JobResources
from outlast.launch.event_loop import Timer
from outlast.launch.hosts.job.leave_notice import HealthWatch, LeaveNotice
from outlast.launch.hosts.plan import JobPlan, Leave, Move, MoveRank, Return, Stay

LEAVING = (signal.SIGTERM, signal.SIGINT)
"""The signals on which one of several hosts leaves."""


class Departing:
    """The leave of the host `me`, an ID. `began`: its ranks leave, and are not replaced here."""

    def __init__(
        self, resources: JobResources, agent: Agent, me: str, keys: Callable[[], JobKeys]
    ) -> None:
        self._resources, self._agent, self._me, self._keys = resources, agent, me, keys
        self.began = self._asked = False
        self._timers: list[Timer] = []
        self._watches: list[LeaveNotice | HealthWatch] = []
        self._reason = ""

    def takes(self, number: signal.Signals, plan: JobPlan) -> bool:
        """Whether the host leaves because of this signal, rather than that the job stops."""
        known = plan.drains.get(self._me)
        again = known is not None and known.signal and number is signal.SIGINT
        if not self._resources.job.leaves_on_signal or number not in LEAVING or again:
            return False
        job = self._keys().job()
        return plan.running and job.state is JobState.RUNNING and not job.stopping

    def watch(self, source: str | None, told: Callable[[str], None]) -> None:
        health = self._resources.job.health
        if source is not None:
            self._watches.append(LeaveNotice(self._resources, source, told))
        if health is not None and health.interval_s is not None:
            self._watches.append(HealthWatch(self._resources, health, told))

    def decided(self, entry: Leave | Stay | Move | Return, plan: JobPlan) -> None:
        """What was decided on this host: it is to leave, it stays after all, or its ranks move to
        another host or only leave.
        """
        if isinstance(entry, Leave):
            self._reason = entry.reason
            if entry.signal and not self._timers:
                grace_s, later = self._resources.job.grace_s, self._resources.loop.call_later
                self._timers = [later(grace_s / 2, self._hurry), later(grace_s, self._give_up)]
        elif isinstance(entry, Stay):
            self._cancel()
            self.began = False
        elif isinstance(entry, Return):
            self.began = self._asked
        else:
            self.began = True
            self._agent.moves.cancel()
            if not entry.to:
                place = plan.moves[entry.host]
                self._ask(place * self._resources.job.nproc, saves=False)

    def move_rank(self, entry: MoveRank) -> None:
        if entry.host == self._me and (
            problem := self._agent.moves.begin(entry.rank, entry.reason)
        ):
            self._resources.console.say(problem)

    def replaces(self, rank: int) -> bool:
        """Whether a rank that dies is replaced here, though its successor starts on another host:
        that may take long. Not once the ranks were asked to leave.
        """
        return not self._asked and self._keys().replaces(self._me, rank)

    def close(self) -> None:
        self._cancel()
        for watch in self._watches:
            watch.close()

    def _cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def outcome(self) -> Outcome:
        """What this launcher tells when the host has left."""
        codes = self._resources.workers.last_exit_codes.values()
        reason = self._reason if self.began else ""
        return Outcome(job=self._keys().job(), left=reason, left_in_order=not any(codes))

    def _hurry(self) -> None:
        workers = list(self._resources.workers)
        if workers and self._keys().job().state is JobState.RUNNING:
            self.began = True
            self._say("no other host is ready to take its place: its ranks save, and leave")
            self._ask(workers[0].rank - workers[0].local_rank, saves=True)

    def _give_up(self) -> None:
        if self._resources.workers:
            grace = f"{self._resources.job.grace_s:g} s (--grace)"
            self._say(f"its ranks have not left within {grace}: they are killed")
            self.began = True
            self._agent.depart(signal.SIGKILL)

    def _ask(self, first: int, *, saves: bool) -> None:
        self._asked = True
        ranks = range(first, first + self._resources.job.nproc)
        self._keys().ask_to_leave(self._me, ranks, self._reason, saves=saves)

    def _say(self, line: str) -> None:
        self._resources.console.say(f"this host leaves the job ({self._reason}): {line}")

"""What must hold in every step of a simulated run, and at its end: R1, R2, R5 and R6."""

from __future__ import annotations

from typing import Any

from outlast.coordination import barrier
from outlast.coordination.decision import Decision, ViewRecord
from outlast.coordination.membership import COMPLETED, MembershipProtocol, decision_key
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.records import lines
from outlast.errors import RankLostError, RankMoved, RestartAbort, RestartError, UnrecoverableFault
from outlast.events.fault_record import FaultRecord, ends
from outlast.inprocess.recovery.host_protocol import GrowPolicy
from simulation.fault_budget import Schedule
from simulation.scheduler import Simulation, Task
from simulation.simulated_member import HOLD_S, PAUSE_S, STOPPED, SimulatedMember


class Invariants:
    """Checks a run; `simulate.py` lists what is checked. The simulated job keeps `members`, the
    live ones, up to date.
    """

    def __init__(
        self, schedule: Schedule, sim: Simulation, members: dict[Task, SimulatedMember]
    ) -> None:
        self.schedule, self.sim, self.members = schedule, sim, members
        self.sizes: dict[int, int] = {}
        self.finished: dict[int, set[int]] = {}
        self.known: dict[int, tuple[frozenset[int], list[int]]] = {}
        self.told_to_stop: dict[int, bool] = {}  # before the view was decided
        self.failed_in: dict[int, bool] = {}  # whether a rank reported a fault
        self._newest = 0  # the newest iteration that is decided
        self.last: set[int] = set()  # the iterations that began with a request to stop
        self.suspected: set[int] = set()
        self.causes: dict[int, int] = {}
        self.stopped_at: int | None = None
        self.reporters = 0
        self.saved: set[int] = set()  # the members that have saved what they keep
        self.end: Decision | None = None  # that after which the members only save
        self.broken: list[str] = []
        self.timeouts_seen = 0

    def _read(self, key: str) -> list[dict[str, Any]]:
        return lines(self.sim.store.table.get(key))

    def _ledger(self) -> frozenset[int]:
        return frozenset(record["member"] for record in self._read(barrier.LEDGER))

    def _asked(self, lost: frozenset[int]) -> list[dict[str, Any]]:
        """The requests to join, without those that succeed a member which is still there."""
        joins = self._read("joins")
        return [said for said in joins if said["succeeds"] < 0 or said["succeeds"] in lost]

    def must(self, holds: bool, what: str) -> None:
        """Records a broken invariant: the member that finds it may die before it can raise."""
        if not holds:
            self.broken.append(what)

    def started(self, host: SimulatedMember) -> None:
        """R1 and R2, when a member has passed the barrier `start/k`."""
        k, assigned, expected = host.iteration, host.assigned, host.machine.record.expected
        assert assigned is not None
        arrived = self._read(f"start/{k}/arrived")
        ranks = sorted(said["rank"] for said in arrived)
        self.must(
            ranks == list(range(assigned.world_size)), f"R1: ranks {ranks} in {k}: {assigned}"
        )
        size = self.sizes.setdefault(k, assigned.world_size)
        self.must(
            size == assigned.world_size, f"R1: world sizes {size}, {assigned.world_size} in {k}"
        )
        lost = self._ledger()
        if host.member in lost:
            return  # mistaken for lost: no other member waits for it
        for other in self.members.values():
            if other is host or other.leaving or other.member in lost:
                continue
            self.must(
                not other.inside or other.iteration == k,
                f"R2: {host.name} enters {k} while {other.name} is in {other.iteration}",
            )
            self.must(
                other.assigned is None or other.member in expected or not other.keeps
                if host.machine.record.saves
                else other.assigned is None or other.member in expected,
                f"R1: {other.name} is alive, and not in the view of {k}",
            )

    def watch(self) -> None:
        """Called between all steps. Notes what is known when the last member has left an iteration:
        the decision must contain it. R2: until then there is none.
        """
        table, k = self.sim.store.table, self._newest
        before = self._decision(k)
        if before is None:
            return
        arrived = self._read(f"term/{k}/arrived")
        lost = self._ledger()
        left = before.view.expected <= lost | {said["member"] for said in arrived}
        if left and k + 1 not in self.known:
            asked = [said["member"] for said in self._asked(lost)]
            self.known[k + 1] = lost, asked
            self.told_to_stop[k + 1] = "stop" in table
            faults = [FaultRecord(**said) for said in self._read(f"fault/{k}")]
            self.failed_in[k] = any(not (ends(f) or f.may_be_harmless) for f in faults)
        if decision_key(k + 1, 0) in table:
            self.must(left, f"R2: what follows {k} is decided before all have left it")
            for other in self.members.values():
                inside = other.inside and other.iteration == k and not other.leaving
                self.must(
                    not inside or other.member in lost,
                    f"R2: what follows {k} is decided while {other.name} is in it",
                )
            if self._decision(k + 1) is not None:
                self._newest += 1

    def _decision(self, k: int) -> Decision | None:
        return drive(MembershipProtocol(Link(), 0).decision(k), perform_on(self.sim.store))

    def decided(self, record: ViewRecord) -> None:
        """R1 of a view, when a member follows it. A request to stop is in the next view, and no
        iteration follows that one.
        """
        told = self.told_to_stop.get(record.iteration, False)
        self.must(record.stop is not None or not told, f"{record} lacks the request to stop")
        if record.stop is not None and not record.saves:
            self.last.add(record.iteration)
        self.must(len(self.last) <= 1, f"iterations {sorted(self.last)} follow a stop")
        if record.iteration not in self.known:
            return
        lost, asked = self.known[record.iteration]
        self.must(not record.expected & lost, f"R1: {record} has lost members: {sorted(lost)}")
        both = {j.succeeds for j in record.joiners} & record.expected
        self.must(not both, f"R1: {record} has {sorted(both)} and those that succeed them")
        if self.schedule.grow is GrowPolicy.NEVER or record.saves:
            return
        left_out = set(asked) - record.expected - self._ledger()
        self.must(not left_out, f"R1: {record} leaves out {sorted(left_out)}, which asked before")

    def ends(self, decision: Decision) -> None:
        """R5: one iteration in which members save precedes the end, which it does not change."""
        if decision.view.saves:
            at = decision if self.end is None else self.end
            self.must(at == decision, f"R5: members save in {at.view}, and in {decision.view}")
            self.end = decision
        elif decision.ends and self.end is None:
            k, stop = decision.view.iteration - 1, decision.view.stop
            keep = {said["member"] for said in self._read(f"term/{k}/arrived") if "keeps" in said}
            lost = keep <= self._ledger() or (stop is not None and bool(stop.done))
            self.must(lost, f"R5: the job ends, and {sorted(keep)} have not saved what they keep")
        elif decision.ends and self.end is not None:
            kept = (decision.history, decision.ended_by, decision.view.ends_job)
            before = (self.end.history, self.end.ended_by, self.end.view.ends_job)
            self.must(kept == before, f"R5: the job ends with {kept}, and was to end with {before}")

    def caused(self, iteration: int, cause: FaultRecord | None) -> None:
        """R6: all members name the same first cause, a fault of that iteration."""
        member = -1 if cause is None else cause.member
        named = self.causes.setdefault(iteration, member)
        self.must(named == member, f"R6: the cause of {iteration} is member {named}, and {member}")
        # A late joiner may still follow the decisions before that.
        goes_on = self.stopped_at is None or iteration < self.stopped_at
        self.must(goes_on, f"R5: {iteration} goes on, {self.stopped_at} stopped")
        decision = self._decision(iteration + 1)
        if decision is None or not decision.view.expected:
            return  # it is forgotten
        grows = bool(decision.view.joiners)
        failed = self.failed_in.get(iteration, False)
        self.must(cause is not None or grows or not failed, f"R6: {iteration} has no cause")
        # A live member that was reported as lost may arrive after the decision.
        if cause is not None and not self.suspected:
            arrived = {said["member"] for said in self._read(f"term/{iteration}/arrived")}
            view = self._decision(iteration)
            late = member in arrived or (view is not None and member not in view.view.expected)
            own = cause.iteration == iteration and not (ends(cause) and late)
            self.must(own, f"R6: {cause} is not the cause of the end of {iteration}")

    def stopped(self, iteration: int, cause: FaultRecord, reports: bool) -> None:
        """R5 and R6: all members end with the same iteration, no member goes on, and at most one
        reports the cause (none if it died before it could).
        """
        at = iteration if self.stopped_at is None else self.stopped_at
        self.must(at == iteration, f"R5: {iteration} stopped, and {at} stopped")
        self.must(iteration not in self.causes, f"R5: {iteration} stopped, and went on")
        self.stopped_at = iteration
        self.reporters += reports
        self.must(self.reporters <= 1, f"R6: {self.reporters} members report the cause")

    def returned(self, iteration: int, member: int) -> None:
        self.finished.setdefault(iteration, set()).add(member)

    def check_holds(self) -> None:
        """R5: a hold for replacements times out only if the job is not full, and not decided."""
        for task, key in self.sim.timeouts[self.timeouts_seen :]:
            self.timeouts_seen += 1
            if key.startswith("resume/"):
                continue  # a pause between equal faults
            if not key.startswith("decision/") or key.endswith("/0"):
                self.must(False, f"R5: it took a timeout of the wait for {key}")
            elif (host := self.members.get(task)) is not None:
                k = host.iteration
                lost = self._ledger()
                known = self._asked(lost) + self._read(f"start/{k}/arrived")
                present = {said["member"] for said in known} - lost
                full = len(present) >= self.schedule.members
                self.must(not full, f"R5: the restart of {k} was held, and the job was full")
                ahead = any(other.iteration > k for other in self.members.values())
                self.must(not ahead, f"R5: {k} was held, and was decided")

    def completed(self, task: Task, host: SimulatedMember) -> None:
        k, record = host.iteration, host.machine.record
        over = self.sim.store.table.get(f"over/{k}")
        assert over == COMPLETED, f"R5: {host.name} completed {k}, which is not"
        if host.member not in record.expected or record.iteration != k:
            assert task.value is None, f"R5: {host.name} was in no view, and returned a value"
            return
        arrived = {said["member"] for said in self._read(f"start/{k}/arrived")}
        missing = arrived - self.finished.get(k, set())
        assert not missing, f"R5: {k} completed without members {sorted(missing)}"
        assert host.assigned is not None
        wanted = host.name if host.assigned.active else None
        assert task.value == wanted, f"R5: {host.name} returned {task.value!r}"

    def failed(self, error: BaseException, host: SimulatedMember) -> None:
        allowed = error is host.given
        if isinstance(error, SystemExit) and "stop" in self.sim.store.table:
            allowed |= error.code == STOPPED
        if isinstance(error, UnrecoverableFault):
            allowed |= self.stopped_at is not None
        elif isinstance(error, RestartAbort):
            allowed |= any(said.get("ends_job") for said in self._read(barrier.LEDGER))
            allowed |= self.end is not None and self.end.ended_by is not None
        elif isinstance(error, RankMoved):
            allowed |= any(host.member in said["members"] for said in self._read("leaves"))
        elif isinstance(error, RankLostError):
            allowed |= host.member in self.suspected
        elif type(error) is RestartError and self.schedule.grow is GrowPolicy.NEVER:
            allowed |= host.member < 0
        assert allowed, f"R5: {host.name} ended with {error!r}"

    def finish(self, ended: list[tuple[Task, SimulatedMember]], born: int) -> None:
        """What must hold when all members have ended."""
        self.check_holds()
        assert not self.broken, "; ".join(self.broken)
        completed = {host.iteration for task, host in ended if task.error is None}
        assert len(completed) <= 1, f"R5: members completed in iterations {sorted(completed)}"
        enders = {host.member for _, host in ended if isinstance(host.given, RestartAbort)}
        assert not (completed and enders - self.suspected), "R5: a job that was ended has completed"
        assert not completed or self.stopped_at is None, "R5: a job that stopped has completed"
        if completed:
            done = self.sim.store.table.get(barrier.done_key("goodbye"))
            assert done is not None, "R5: the store's host waits for a goodbye forever"
        # Each decision may be held once, and once more by a joiner after all others have died.
        held = (HOLD_S + PAUSE_S) * (len(self.known) + born)
        assert self.sim.clock.now() <= held, f"R5: it took {self.sim.clock.now()} s"

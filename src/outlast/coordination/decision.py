"""What the members do after an iteration: one `Decision`, a pure function of what the store says.

`next_record` is called by a process that has found that every member has left iteration k
(`Decisions.decide`, which reads the `Facts` and claims the result). It returns the decision, or a
`Held` note if the restart waits: for the launchers, which find out whether a link between two hosts
is broken, or for the replacements of lost ranks.

The decision contains a `ViewRecord`: the ranks of iteration k, the members lost since, and the
joiners. A *member* is one process in the job, with an id for life. Every member computes the same
slots from the record: a replacement takes the slot of a lost member, first the one that it asks for
(a launcher starts the replacement of rank 2 as rank 2), so that survivors keep their ranks; further
joiners are appended. Empty slots are the *terminated ranks*, which the rank assignment closes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import msgspec

from outlast.coordination.records import (
    LostRecord,
    SizeRecord,
    StopRecord,
    pack,
    suspects_link,
    unpack,
)
from outlast.coordination.repeated_faults import FaultHistory, RepeatedFaults, add_fault
from outlast.events.fault_record import FaultRecord, ends
from outlast.events.first_cause import first_cause


@dataclasses.dataclass(frozen=True)
class Joiner:
    """A process that asks to join."""

    member: int
    preferred: int = -1  # the rank that it was started as
    token: str = dataclasses.field(default="", compare=False)  # in its request only
    succeeds: int = -1  # the member whose place it takes once that has left: see `moves`


@dataclasses.dataclass(frozen=True)
class ViewRecord:
    """The agreed facts from which iteration `iteration` starts."""

    iteration: int
    base: tuple[Any, ...]  # the member at each rank of the iteration before; `None`: no member
    lost: frozenset[int] = frozenset()  # members of `base` that are out of the job
    joiners: tuple[Joiner, ...] = ()  # in the order in which they asked
    stop: StopRecord | None = None  # the request to stop, if it was known at the decision
    ends_job: bool = False  # every member leaves, because of `stop`
    # The members only save in it what they keep of the job, which then ends as the decision says.
    saves: bool = False

    @functools.cached_property
    def expected(self) -> frozenset[int]:
        present = {m for m in self.base if m is not None and m not in self.lost}
        return frozenset(present | {j.member for j in self.joiners})

    def slots(self) -> tuple[int | None, ...]:
        """The member in each slot, including joiners; `None` for an empty slot."""
        slots = [None if m in self.lost else m for m in self.base]
        waiting = list(self.joiners)
        for joiner in sorted(self.joiners, key=lambda each: each.succeeds not in self.base):
            before = joiner.succeeds in self.base
            place = self.base.index(joiner.succeeds) if before else joiner.preferred
            if 0 <= place < len(slots) and slots[place] is None:
                slots[place] = joiner.member
                waiting.remove(joiner)
        empty = [place for place, member in enumerate(slots) if member is None]
        for place, joiner in zip(empty, waiting, strict=False):
            slots[place] = joiner.member
        slots.extend(joiner.member for joiner in waiting[len(empty) :])
        return tuple(slots)

    def packed(self) -> ViewRecord:
        """With `base` as runs: what all members read must not grow with their number."""
        return dataclasses.replace(self, base=tuple(pack(self.base)))

    def unpacked(self) -> ViewRecord:
        return dataclasses.replace(self, base=tuple(unpack(self.base)))

    def with_stop(self, stop: StopRecord, before: ViewRecord | None) -> ViewRecord:
        """This view under a request to stop.

        One iteration may follow the request. In it, the members restore the newest state, save it
        if it is only in memory, and leave. None follows if that has been done; if `before`, the
        view of the iteration that has just ended, was that iteration; or if a rank was lost and not
        replaced: its part of a state in memory is lost too, so nothing is left to save.
        """
        tried = before is not None and before.stop is not None
        ends = bool(stop.done) or tried or None in self.slots()
        return dataclasses.replace(self, stop=stop, ends_job=ends)


def decide(
    iteration: int,
    roster: dict[int, int],
    world_size: int,
    lost: frozenset[int],
    joiners: list[Joiner],
) -> ViewRecord:
    """The view of `iteration`, from the roster of the one before it (ranks without a member are
    empty slots), the ledger, and all processes that ever asked to join.
    """
    base = tuple(roster.get(rank) for rank in range(world_size))
    inside = set(base)
    return ViewRecord(
        iteration=iteration,
        base=base,
        lost=frozenset(m for m in base if m is not None and m in lost),
        joiners=tuple(
            Joiner(j.member, j.preferred, succeeds=j.succeeds)
            for j in joiners
            if j.member not in inside and j.member not in lost
        ),
    )


@dataclasses.dataclass(frozen=True)
class Rules:
    """The arguments of the wrapped call on which decisions depend: the same on all members."""

    grow: bool = True  # new processes are admitted
    repeated: RepeatedFaults | None = None  # `None`: the job restarts without limit
    await_size: int = 0  # a restart is held until there are this many members; 0: it is not held
    reserve: bool = False  # idle members take over: it is held only for as many as were active
    chosen_s: float = 0.0  # how long it is held at most, if `AwaitReplacements` says so
    hosts: bool = False  # launchers look for broken links between the hosts of the job


class Reached(str, enum.Enum):
    """The fact after which a decision was made: the last one that it needed."""

    ARRIVED = "all arrived"
    LOST = "a loss"
    ASKED = "a request"  # to join or to stop, or what a launcher says
    TIMEOUT = "a timeout"  # of a wait


@dataclasses.dataclass(frozen=True)
class Decision:
    """The agreed facts with which an iteration starts, or with which the job ends."""

    view: ViewRecord  # the members of the iteration, and the request to stop
    history: FaultHistory = dataclasses.field(default_factory=FaultHistory)
    last_cause: FaultRecord | None = None  # of the last iteration that ended because of a fault
    ended_by: LostRecord | None = None  # the member that has ended the job
    # Ranks for which a restart was held until the time was over: they are not waited for again.
    unreplaced: frozenset[int] = frozenset()
    reached: Reached = dataclasses.field(default=Reached.ARRIVED, compare=False)

    @property
    def cause(self) -> FaultRecord | None:
        """Why the iteration before this one ended; `None` if no rank failed."""
        last = self.last_cause
        return last if last is not None and last.iteration == self.view.iteration - 1 else None

    @property
    def ends(self) -> bool:
        """Whether no iteration follows: every member that reads this leaves."""
        return self.ends_job and not self.view.saves

    @property
    def ends_job(self) -> bool:
        """Whether the job ends, now or after an iteration in which its members only save."""
        return bool(self.history.stop) or self.ended_by is not None or self.view.ends_job

    @functools.cached_property
    def survivors(self) -> frozenset[int]:
        return self.view.expected - {joiner.member for joiner in self.view.joiners}

    @property
    def witnesses(self) -> list[int]:
        """The members that write the decision to their event logs: two, as one may be lost."""
        return sorted(self.survivors or self.view.expected)[:2]

    @property
    def reporter(self) -> int:
        """The member that shows the user the decision: the one that failed, else the first left."""
        cause = self.history.cause or self.cause
        if cause is not None and cause.member in self.survivors:
            return cause.member
        return min(self.survivors or self.view.expected, default=-1)


@dataclasses.dataclass(frozen=True)
class Held:
    """The note that a restart waits; its members wait for the next record. A member that was
    mistaken for lost leaves the job at once: it is replaced only once its process has ended.
    """

    links: bool  # it waits for the launchers; otherwise for replacements
    lost: frozenset[int] = frozenset()  # the members of the iteration that count as lost
    # The ranks that it waits for, as numbered by the launcher; and what the launchers are told.
    ranks: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    size: SizeRecord | None = dataclasses.field(default=None, compare=False)

    @property
    def what(self) -> str:
        return "links" if self.links else "replacements"


# Made here, and not at the first fault: that takes some milliseconds of each rank and its monitor.
_DECISION, _HELD = msgspec.json.Decoder(Decision), msgspec.json.Decoder(Held)


def encode_record(record: Decision | Held) -> bytes:
    """A record for the store."""
    if isinstance(record, Decision):
        record = dataclasses.replace(record, view=record.view.packed())
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> Decision | Held:
    """The inverse of `encode_record`."""
    if data.startswith(b'{"links"'):
        return _HELD.decode(data)
    decision = _DECISION.decode(data)
    return dataclasses.replace(decision, view=decision.view.unpacked())


def forgotten(iteration: int) -> bytes:
    """What is left of a decision when no member can still be in the iteration: an empty view."""
    return msgspec.json.encode({"view": {"iteration": iteration, "base": []}})


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the store says about iteration k when every member has left it."""

    before: Decision  # with which the iteration started
    roster: dict[int, int]  # the member at each rank of the iteration
    world_size: int  # of the iteration
    arrived: dict[int, dict[str, Any]]  # the record of each member that has left the iteration
    ledger: list[LostRecord]
    faults: list[FaultRecord]  # those of the iteration, and of members that ended later
    joiners: list[Joiner]  # all processes that ever asked to join
    stop: StopRecord | None
    given_up: frozenset[int] = frozenset()  # ranks not replaced; read only if a rank is missing
    links_known: bool = False  # the launchers have found out which links are broken
    grows: bool = False  # it has ended for joiners, after a step that the ranks had agreed on

    @functools.cached_property
    def lost(self) -> frozenset[int]:
        return frozenset(record.member for record in self.ledger)

    @property
    def ended_by(self) -> LostRecord | None:
        """The member that has ended the job; it may still be there, to save what it keeps."""
        left = [record for record in self.ledger if record.ends_job]
        stay = [LostRecord(f.member, f.cause, ends_job=True) for f in self.faults if f.ends_job]
        return next(iter((*left, *stay)), None)

    @property
    def present(self) -> frozenset[int]:
        asked = {joiner.member for joiner in self.joiners}
        return frozenset(self.roster.values()) - self.lost | (asked - self.lost)

    def own_faults(self) -> list[FaultRecord]:
        """The faults with which the iteration can have ended. The end of a member that had left it
        before, or that took no part in it, is not one of them.
        """
        missing = self.before.view.expected - self.arrived.keys()
        return [fault for fault in self.faults if not ends(fault) or fault.member in missing]


def next_record(
    facts: Facts, rules: Rules, last: Held | None = None, expired: Held | None = None
) -> Decision | Held:
    """The decision that follows from `facts`, or a note that it waits.
    `last` is the note before, if there is one: a restart waits for the launchers first. `expired`
    is the note whose wait has lasted too long.
    """
    k, before = facts.before.view.iteration, facts.before
    if before.view.saves:  # whatever has become of that
        view = decide(k + 1, facts.roster, facts.world_size, facts.lost, [])
        stop = before.view.stop and facts.stop
        view = dataclasses.replace(view, stop=stop, ends_job=before.view.ends_job)
        return dataclasses.replace(before, view=view)
    joiners = facts.joiners if rules.grow else []
    view = decide(k + 1, facts.roster, facts.world_size, facts.lost, joiners)
    faults = facts.own_faults()
    cause = first_cause(faults)
    left = any(r.moved and r.member in before.view.expected for r in facts.ledger)
    moved = left or facts.grows
    if cause is not None and cause.may_be_harmless and (view.joiners or moved):
        cause = None  # no rank failed: connections broke because ranks come or leave
    history = _history(facts, cause, faults, rules.repeated, moved=moved)
    ended_by = facts.ended_by
    last_cause, unreplaced = cause or before.last_cause, before.unreplaced
    if facts.stop is not None:
        view = view.with_stop(facts.stop, before.view)
        history = history.without_end()  # the job ends with its exit code
    if history.stop:
        ended_by = None
    elif ended_by is not None:
        last_cause = _cause_of_abort(facts, faults) or before.last_cause or cause
    elif facts.stop is None:
        lost = facts.lost & before.view.expected
        ask = rules.hosts and cause is not None and suspects_link(cause) and not facts.links_known
        if ask and (last is None or last.links) and not (expired is not None and expired.links):
            return Held(True, lost)
        missing = _missing(facts, rules)
        unreplaced &= missing  # a rank that has come back is waited for again
        awaited = missing - unreplaced - facts.given_up
        if len(facts.present) < _needed(facts, rules) and awaited:
            if expired is None or expired.links:
                least = max((each.get("least", -1) for each in facts.arrived.values()), default=-1)
                size = SizeRecord(len(facts.present), least, rules.chosen_s)
                return Held(False, lost, tuple(sorted(awaited)), size)
            unreplaced |= missing
    decision = Decision(view, history, last_cause, ended_by, unreplaced)
    if decision.ends_job:  # no restart follows
        history = dataclasses.replace(history, restarts=before.history.restarts)
        view = _saving(facts, view)
        decision = dataclasses.replace(decision, view=view, history=history)
    return decision


def _saving(facts: Facts, view: ViewRecord) -> ViewRecord:
    """The view of the iteration in which the members save what they keep, before the job ends: of
    those that keep something. If there is none, or it is saved: `view`.
    """
    keep = {m for m, record in facts.arrived.items() if record.get("keeps")} - facts.lost
    roster = {rank: member for rank, member in facts.roster.items() if member in keep}
    if not roster or (facts.stop is not None and facts.stop.done):
        return view
    saving = decide(view.iteration, roster, facts.world_size, facts.lost, [])
    return dataclasses.replace(saving, stop=view.stop, ends_job=view.ends_job, saves=True)


def _history(
    facts: Facts,
    cause: FaultRecord | None,
    faults: list[FaultRecord],
    policy: RepeatedFaults | None,
    *,
    moved: bool,
) -> FaultHistory:
    records = facts.arrived.values()
    steps = [each.get("step", 0) for each in records] + [fault.step for fault in faults]
    step = max(steps, default=0)
    # The first ping often stands at the top of the loop, before the code that has never run.
    pings = [each.get("pings", 0) for each in records] + [fault.pings for fault in faults]
    return add_fault(facts.before.history, cause, step, max(pings, default=0) > 1, policy, moved)


def _cause_of_abort(facts: Facts, faults: list[FaultRecord]) -> FaultRecord | None:
    """Why the job was ended. A member's giving up is the cause only if no other fault made it give
    up. What the end of the job overtook did not, nor the connections that broke because it left.
    """
    enders = {record.member for record in facts.ledger if record.ends_job}
    others = [fault for fault in faults if fault.member not in enders]
    return first_cause([fault for fault in others if not fault.may_be_harmless])


def _needed(facts: Facts, rules: Rules) -> int:
    """The number of members for which a restart is held."""
    if not rules.reserve:
        return rules.await_size
    active = max((each.get("active", 0) for each in facts.arrived.values()), default=0)
    return min(active, rules.await_size)


def _missing(facts: Facts, rules: Rules) -> frozenset[int]:
    """The ranks that are not there, as numbered by the launcher. The first members were started as
    the ranks of the first view, which are their IDs.
    """
    started_as = {joiner.member: joiner.preferred for joiner in facts.joiners}
    there = {started_as.get(member, member) for member in facts.present}
    return frozenset(range(rules.await_size)) - there

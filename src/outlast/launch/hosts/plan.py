"""The state of a job on many hosts: which hosts there are, their places, and what was decided.

The group has one chain of entries. An entry says that a host has joined or was lost, or it is a
decision: an agent that wants one claims the next number; if another entry was first, it applies
that, and looks whether its own is still needed. So all agents see the same entries in the same
order, and each computes the same state from them. An entry that has no meaning in the state that it
finds (a second restart of one attempt) changes nothing but the number: `applied_to` returns the
state that it was given.

    FORMING -- Start --> RUNNING -- Restart --> CLEARING -- Start --> RUNNING
    any of them -- Stop, End --> ENDING; RUNNING, ENDING -- Finish --> FINISHED
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import replace
from typing import TypeAlias

import msgspec

from outlast.coordination.replicated.hosts import ChainEntry, HostInfo, HostJoined, HostLost
from outlast.launch.hosts.host_entries import Blame, Check, Checked, Links, Probe, Unfit


class Stage(enum.Enum):
    """Where the job stands."""

    FORMING = "forming"
    """Hosts join; no worker has been started."""
    RUNNING = "running"
    CLEARING = "clearing"
    """Each host ends the workers of the attempt, before the next one starts."""
    ENDING = "ending"
    """Each host ends its workers; no attempt follows."""
    FINISHED = "finished"
    """No worker is left on any host."""


class Start(ChainEntry, frozen=True, tag="start"):
    """An attempt starts, with the host at each place. `used`: restarts and replacements before."""

    attempt: int
    places: tuple[str, ...]
    used: int = 0
    nproc: int = 1  # ranks of each host

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if plan.stage not in (Stage.FORMING, Stage.CLEARING):
            return plan
        return replace(
            plan,
            stage=Stage.RUNNING,
            attempt=self.attempt,
            places=self.places,
            size=len(self.places),
            nproc=self.nproc,
            taken_over=(0,) * len(self.places),
            given_up=frozenset(),
            used=self.used,
            probed="",
            probe=None,
            check=None,  # it would have the accelerators when ranks start
            restart=None,
            moves={},
        )


class Take(ChainEntry, frozen=True, tag="take"):
    """A host takes the place of a lost one, or a new place after the last; its workers join the
    running call.
    """

    place: int
    host: str

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if not plan.running or self.host in plan.places or self.place > len(plan.places):
            return plan
        taken = plan.with_new_host(self.place, self.host)
        return replace(taken, given_up=plan.given_up - {self.place})


class GiveUp(ChainEntry, frozen=True, tag="give up"):
    """No host will take these places."""

    places: tuple[int, ...]

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if not plan.running:
            return plan
        return replace(plan, given_up=plan.given_up | set(self.places))


class Restart(ChainEntry, frozen=True, tag="restart"):
    """All workers on all hosts are ended and started again. `counts` is false for a restart that
    `--max-restarts` does not limit, because nothing has failed. `process` is the worker that has
    caused it, if one has, and `blames` says whether that counts for its host.
    """

    attempt: int
    cause: str
    counts: bool = True
    process: str = ""
    blames: bool = True

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if not plan.running or self.attempt != plan.attempt:
            return plan
        after = replace(plan, stage=Stage.CLEARING, restart=self, check=None)
        if not self.process or not self.blames:
            return after
        owner = self.process.rpartition(":")[0]  # see `records.process_name`
        return Blame(owner, f"{self.attempt}", self.cause).applied_to(after)


class Stop(ChainEntry, frozen=True, tag="stop"):
    """The job was told to stop by a signal to the agent of `host`."""

    signal: int
    host: str

    def applied_to(self, plan: JobPlan) -> JobPlan:
        return plan if plan.ends else replace(plan, stage=Stage.ENDING, stop=self, check=None)


class End(ChainEntry, frozen=True, tag="end"):
    """The job has failed, and ends. `process` is the worker that has caused it, if one has."""

    cause: str
    process: str = ""

    def applied_to(self, plan: JobPlan) -> JobPlan:
        return plan if plan.ends else replace(plan, stage=Stage.ENDING, end=self, check=None)


class Leave(ChainEntry, frozen=True, tag="leave"):
    """A host is to leave: its ranks move at the end of a step. `signal`: the one that said so."""

    host: str
    reason: str
    signal: int = 0

    def applied_to(self, plan: JobPlan) -> JobPlan:
        before = plan.drains.get(self.host)
        known = before is not None and (before.signal or not self.signal)
        if plan.ends or known or self.host not in plan.hosts:
            return plan
        return replace(plan, drains={**plan.drains, self.host: self})


class MoveRank(ChainEntry, frozen=True, tag="move rank"):
    """A rank of a host moves to another process of it. `request`: its ID, as it counts once."""

    host: str
    rank: int
    reason: str
    request: str

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if plan.ends or self.request in plan.moved_ranks:
            return plan
        return replace(plan, moved_ranks=plan.moved_ranks | {self.request})


class Stay(ChainEntry, frozen=True, tag="stay"):
    """A host that was to leave stays, for this reason."""

    host: str
    reason: str

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if self.host not in plan.drains or self.host in plan.moves:
            return plan
        drains = {host: each for host, each in plan.drains.items() if host != self.host}
        return replace(plan, drains=drains)


class Move(ChainEntry, frozen=True, tag="move"):
    """The ranks of a host that is to leave move to another one, which starts their successors; or,
    if `to` is empty, the job goes on without them.
    """

    host: str
    to: str = ""

    def applied_to(self, plan: JobPlan) -> JobPlan:
        place = plan.place_of(self.host)
        if not plan.running or place is None or self.to in plan.places:
            return plan
        moved = replace(plan, moves={**plan.moves, self.host: place})
        if not self.to:
            return replace(moved, given_up=plan.given_up | {place})
        return moved.with_new_host(place, self.to)


class Return(ChainEntry, frozen=True, tag="return"):
    """The host to which the ranks of `host` were to move is lost, and they are still in the job:
    they stay where they are, until another host can take them.
    """

    host: str

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if not plan.running or plan.takes_over(self.host) not in plan.lost:
            return plan
        places, moves = list(plan.places), dict(plan.moves)
        places[moves.pop(self.host)] = self.host
        return replace(plan, places=tuple(places), moves=moves)


class Finish(ChainEntry, frozen=True, tag="finish"):
    """No worker is left on any host."""

    def applied_to(self, plan: JobPlan) -> JobPlan:
        over = plan.running or plan.stage is Stage.ENDING
        return replace(plan, stage=Stage.FINISHED) if over else plan


_OfAttempts: TypeAlias = Start | Take | GiveUp | Restart | Stop | End | Finish
_OfLinks: TypeAlias = Probe | Links | Check | Checked
_OfHosts: TypeAlias = HostJoined | HostLost | Blame | Unfit
_OfMoves: TypeAlias = Leave | MoveRank | Stay | Move | Return
Entry: TypeAlias = _OfAttempts | _OfLinks | _OfHosts | _OfMoves
Asked: TypeAlias = Leave | MoveRank  # what a user asks for
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)
decode = _decoder.decode


@dataclasses.dataclass(frozen=True, kw_only=True)
class LostHost:
    """A host that is no longer in the group. `left` is true if it has left in an orderly way."""

    host: HostInfo
    reason: str
    left: bool = False

    def __str__(self) -> str:
        host = f"host {self.host}"
        if self.left and self.reason.startswith("it has left"):  # of a host that only left
            return f"{host} has left the group"
        return f"{host} {'left' if self.left else 'was lost'}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """The state after some entries."""

    number: int = 0  # of entries
    # those in the group, by ID, in the order in which they joined
    hosts: dict[str, HostInfo] = dataclasses.field(default_factory=dict)
    # all others that ever joined, in the order in which they were lost
    lost: dict[str, LostHost] = dataclasses.field(default_factory=dict)
    stage: Stage = Stage.FORMING
    attempt: int = -1  # the one that runs or has run last; -1 before the first
    places: tuple[str, ...] = ()  # ID of the host at each place of that attempt
    size: int = 0  # the number of places at its start
    nproc: int = 1  # the number of ranks at each place
    # how many hosts each place had before in this attempt, or was added late
    taken_over: tuple[int, ...] = ()
    given_up: frozenset[int] = frozenset()  # places that stay empty
    used: int = 0  # restarts and replacements in earlier attempts
    probed: str = ""  # the key of the last probe of the links in this attempt
    probe: Probe | None = None  # the one whose result is not known yet
    # hosts that leave the job because of a broken link, with the reason
    excluded: dict[str, str] = dataclasses.field(default_factory=dict)
    check: Check | None = None  # the check of neighbors whose result is not known yet
    checked: frozenset[str] = frozenset()  # hosts that have passed a check of neighbors
    # the faults of hosts that are counted; of a restart of all workers, this is its entry
    blames: tuple[Blame, ...] = ()
    # hosts that leave the job because of their faults, with the reason
    unfit: dict[str, str] = dataclasses.field(default_factory=dict)
    drains: dict[str, Leave] = dataclasses.field(default_factory=dict)  # hosts that are to leave
    # the place of each host whose ranks move, or have moved, in this attempt
    moves: dict[str, int] = dataclasses.field(default_factory=dict)
    moved_ranks: frozenset[str] = frozenset()  # the requests that ranks move, see `MoveRank`
    restart: Restart | None = None  # why the attempt is over; `None` while it runs
    # why the job ends
    stop: Stop | None = None
    end: End | None = None

    @property
    def running(self) -> bool:
        return self.stage is Stage.RUNNING

    @property
    def ends(self) -> bool:
        return self.stage in (Stage.ENDING, Stage.FINISHED)

    @property
    def leaving(self) -> dict[str, str]:
        """The hosts that leave the job, or have left it, by decision; with the reason."""
        return {**self.excluded, **self.unfit}

    @property
    def waiting_to_leave(self) -> list[Leave]:
        """The hosts with a place that are to leave, and whose ranks do not move yet."""
        there = self.hosts.keys() & set(self.places) - self.moves.keys()
        return [each for host, each in self.drains.items() if host in there]

    def takes_over(self, host: str) -> str:
        """The host to which the ranks of this one move, which has not left yet; empty if none."""
        place = self.moves.get(host) if host in self.hosts else None
        return "" if place is None or self.places[place] == host else self.places[place]

    def predecessor(self, host: str) -> Leave | None:
        """The host whose ranks this one is to take. It may have joined since that was decided."""
        return next((self.drains[h] for h in self.moves if self.takes_over(h) == host), None)

    def host(self, name: str) -> HostInfo:
        """A host that is or was in the group, by its ID."""
        return self.hosts[name] if name in self.hosts else self.lost[name].host

    def place_of(self, host: str) -> int | None:
        return self.places.index(host) if host in self.places else None

    def with_new_host(self, place: int, host: str) -> JobPlan:
        """With this host at the place, which may be a new one, after the last."""
        places, taken_over = [*self.places, ""], [*self.taken_over, 0]
        places[place], taken_over[place] = host, taken_over[place] + 1
        size = max(len(self.places), place + 1)
        return replace(self, places=tuple(places[:size]), taken_over=tuple(taken_over[:size]))

    def missing(self) -> list[tuple[int, LostHost]]:
        """The places whose hosts are lost, with the losses."""
        return [
            (place, replace(loss, reason=self.leaving.get(host, loss.reason)))
            for place, host in enumerate(self.places)
            if (loss := self.lost.get(host)) is not None
        ]

    def if_new(self, entry: Asked) -> Asked | None:
        """The entry, unless it has no meaning in this state."""
        return None if entry.applied_to(self) is self else entry

    def apply(self, entry: Entry) -> JobPlan:
        if isinstance(entry, HostJoined):
            after = replace(self, hosts={**self.hosts, entry.info.id: entry.info})
        elif isinstance(entry, HostLost):
            hosts = dict(self.hosts)
            loss = LostHost(host=hosts.pop(entry.host), reason=entry.reason, left=entry.left)
            after = replace(self, hosts=hosts, lost={**self.lost, entry.host: loss})
        else:
            after = entry.applied_to(self)
        return replace(after, number=self.number + 1)

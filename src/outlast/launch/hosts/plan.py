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
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec

from outlast.coordination.replicated.hosts import ChainEntry, HostInfo, HostJoined, HostLost


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

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if plan.stage not in (Stage.FORMING, Stage.CLEARING):
            return plan
        return replace(
            plan,
            stage=Stage.RUNNING,
            attempt=self.attempt,
            places=self.places,
            size=len(self.places),
            taken_over=(0,) * len(self.places),
            given_up=frozenset(),
            used=self.used,
            probed="",
            probe=None,
            check=None,  # it would have the accelerators when ranks start
            restart=None,
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
        places, taken_over = list(plan.places), list(plan.taken_over)
        if self.place == len(places):
            places.append(self.host)
            taken_over.append(1)
        else:
            places[self.place] = self.host
            taken_over[self.place] += 1
        return replace(
            plan,
            places=tuple(places),
            taken_over=tuple(taken_over),
            given_up=plan.given_up - {self.place},
        )


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


class Probe(ChainEntry, frozen=True, tag="probe"):
    """A link between hosts may be broken: each of these hosts is to try to reach the others.
    The members of the wrapped call wait for its end, under `key` in the workers' store.
    """

    attempt: int
    key: str
    hosts: tuple[str, ...]

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if not plan.running or self.attempt != plan.attempt or self.key == plan.probed:
            return plan
        return replace(plan, probed=self.key, probe=self)


class Links(ChainEntry, frozen=True, tag="links"):
    """What a probe has found: the hosts that leave the job, each with the reason, and with the
    hosts that it has to reach before it joins again. Without them, all links are whole.
    """

    attempt: int
    key: str
    excluded: dict[str, str] = msgspec.field(default_factory=dict)
    waits_for: dict[str, list[str]] = msgspec.field(default_factory=dict)

    def applied_to(self, plan: JobPlan) -> JobPlan:
        probe = plan.probe
        if (
            not plan.running
            or probe is None
            or (probe.attempt, probe.key) != (self.attempt, self.key)
        ):
            return plan
        return replace(plan, probe=None, excluded={**plan.excluded, **self.excluded})


class Check(ChainEntry, frozen=True, tag="check"):
    """Each of these hosts makes an all-reduce with its two neighbors in this ring, before any of
    them that is new runs ranks.
    """

    attempt: int
    key: str
    hosts: tuple[str, ...]

    def applied_to(self, plan: JobPlan) -> JobPlan:
        return replace(plan, check=self) if plan.check is None and not plan.ends else plan


class Checked(ChainEntry, frozen=True, tag="checked"):
    """What a check has found. `passed` are the hosts that have made an all-reduce with a host that
    stays; `excluded` and `waits_for` are as in `Links`. A host in neither is checked again.
    """

    key: str
    passed: list[str] = msgspec.field(default_factory=list)
    excluded: dict[str, str] = msgspec.field(default_factory=dict)
    waits_for: dict[str, list[str]] = msgspec.field(default_factory=dict)

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if plan.check is None or self.key != plan.check.key:
            return plan
        checked = plan.checked | set(self.passed)
        excluded = {**plan.excluded, **self.excluded}
        return replace(plan, check=None, checked=checked, excluded=excluded)


class Blame(ChainEntry, frozen=True, tag="blame"):
    """A rank of this host was the first cause of a restart. `restart` names that, as it is counted
    once; `cause` is in words.
    """

    host: str
    restart: str
    cause: str

    def applied_to(self, plan: JobPlan) -> JobPlan:
        known = any(each.restart == self.restart for each in plan.blames)
        return plan if known else replace(plan, blames=(*plan.blames, self))


class Unfit(ChainEntry, frozen=True, tag="unfit"):
    """A host has had too many faults: it leaves the job, and gets no more ranks."""

    host: str
    reason: str

    def applied_to(self, plan: JobPlan) -> JobPlan:
        return replace(plan, unfit={**plan.unfit, self.host: self.reason})


class Finish(ChainEntry, frozen=True, tag="finish"):
    """No worker is left on any host."""

    def applied_to(self, plan: JobPlan) -> JobPlan:
        over = plan.running or plan.stage is Stage.ENDING
        return replace(plan, stage=Stage.FINISHED) if over else plan


_OfAttempts: TypeAlias = Start | Take | GiveUp | Restart | Stop | End | Finish
_OfHosts: TypeAlias = HostJoined | HostLost | Probe | Links | Check | Checked | Blame | Unfit
Entry: TypeAlias = _OfAttempts | _OfHosts
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

    def host(self, name: str) -> HostInfo:
        """A host that is or was in the group, by its ID."""
        return self.hosts[name] if name in self.hosts else self.lost[name].host

    def place_of(self, host: str) -> int | None:
        return self.places.index(host) if host in self.places else None

    def missing(self) -> list[tuple[int, LostHost]]:
        """The places whose hosts are lost, with the losses."""
        return [
            (place, replace(loss, reason=self.leaving.get(host, loss.reason)))
            for place, host in enumerate(self.places)
            if (loss := self.lost.get(host)) is not None
        ]

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


class PlaceConflict(Exception):
    """Two hosts ask for one place, or one asks for a place that does not exist."""


def assign(
    before: Sequence[str], hosts: Iterable[HostInfo], maximum: int, *, asked: bool = False
) -> tuple[str, ...]:
    """The ID of the host at each place, for at most `maximum` places.

    Place p has the ranks from p * nproc on, so the ranks of one host are consecutive. More hosts
    than places are spares, and wait. A host that had a place before keeps it if that still exists,
    and comes before hosts that had none, so that survivors keep their ranks and are never replaced
    by spares. The others take the free places in the order of `hosts`. A `PlaceConflict` naming the
    hosts and the place; with `asked` only.

    Args:
        before: the host at each place of the attempt before.
        asked: whether each host has the place that it asks for (`--node-rank`).
    """
    if asked:
        return _as_asked(hosts, maximum)
    there = [host.id for host in hosts]
    chosen = [host for host in before if host in there]
    chosen += [host for host in there if host not in before]
    del chosen[maximum:]
    places: list[str] = [""] * len(chosen)
    for place, host in enumerate(before[: len(places)]):
        if host in chosen:
            places[place] = host
    waiting = iter([host for host in chosen if host not in places])
    return tuple(host or next(waiting) for host in places)


def _as_asked(hosts: Iterable[HostInfo], maximum: int) -> tuple[str, ...]:
    holders: dict[int, HostInfo] = {}
    for host in hosts:
        if not 0 <= host.place < maximum:
            raise PlaceConflict(
                f"host {host.name} has --node-rank {host.place}, and --nnodes is {maximum}"
            )
        first = holders.setdefault(host.place, host)
        if first is not host:
            raise PlaceConflict(
                f"hosts {first.name} and {host.name} both have --node-rank {host.place}"
            )
    return tuple(holders[place].id for place in sorted(holders))


def ranks_text(place: int, nproc: int) -> str:
    """The ranks of a place, in words."""
    first, last = place * nproc, (place + 1) * nproc - 1
    return f"rank {first}" if nproc == 1 else f"ranks {first} to {last}"

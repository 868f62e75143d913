"""What the agents of a job have decided: one chain of entries, and the state that follows from it.

Entry n is the key `job/plan/n` of the agents' store, and its first claim wins. So the agents see
the same entries in the same order, and each computes the same state from them. An agent that wants
a decision claims the next entry; if another claim was first, it applies that entry and looks
whether its own is still needed. An entry that has no meaning in the state that it finds (a second
restart of one attempt) changes nothing but the number.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, ClassVar


class Stage(enum.Enum):
    """Where the job stands.

    FORMING -- Start --> RUNNING -- Restart --> CLEARING -- Start --> RUNNING
    any of them -- Stop, End --> ENDING; RUNNING, ENDING -- Finish --> FINISHED
    """

    FORMING = "forming"
    """Hosts join; no worker has been started."""
    RUNNING = "running"
    CLEARING = "clearing"
    """Each host ends the workers of the attempt, before the next one starts."""
    ENDING = "ending"
    """Each host ends its workers; no attempt follows."""
    FINISHED = "finished"
    """No worker is left on any host."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A decision."""

    name: ClassVar[str] = ""

    def encode(self) -> bytes:
        """As it is in the store."""
        return json.dumps({"do": self.name, **dataclasses.asdict(self)}).encode()


@dataclasses.dataclass(frozen=True)
class Start(Entry):
    """An attempt starts, with the host at each place."""

    name = "start"
    attempt: int
    places: tuple[str, ...]
    used: int = 0  # restarts and replacements in earlier attempts


@dataclasses.dataclass(frozen=True)
class Take(Entry):
    """A host takes the place of a lost one, or a new place after the last; its workers join the
    running call.
    """

    name = "take"
    place: int
    host: str


@dataclasses.dataclass(frozen=True)
class GiveUp(Entry):
    """No host will take these places."""

    name = "give up"
    places: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Restart(Entry):
    """All workers on all hosts are ended and started again. `counts` is false for a restart that
    `--max-restarts` does not limit, because nothing has failed. `process` is the worker that has
    caused it, if one has.
    """

    name = "restart"
    attempt: int
    cause: str
    counts: bool = True
    process: str = ""


@dataclasses.dataclass(frozen=True)
class Stop(Entry):
    """The job was told to stop by a signal to the agent of `host`."""

    name = "stop"
    signal: int
    host: str


@dataclasses.dataclass(frozen=True)
class End(Entry):
    """The job has failed, and ends. `process` is the worker that has caused it, if one has."""

    name = "end"
    cause: str
    process: str = ""


@dataclasses.dataclass(frozen=True)
class Probe(Entry):
    """A link between hosts may be broken: each of these hosts is to try to reach the others.
    The members of the wrapped call wait for its end, under `key` in the workers' store.
    """

    name = "probe"
    attempt: int
    key: str
    hosts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Links(Entry):
    """What a probe has found: the hosts that leave the job, each with the reason, and with the
    hosts that it has to reach before it joins again. Without them, all links are whole.
    """

    name = "links"
    attempt: int
    key: str
    excluded: dict[str, str] = dataclasses.field(default_factory=dict)
    waits_for: dict[str, list[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Finish(Entry):
    """No worker is left on any host."""

    name = "finish"


_ENTRIES: dict[str, type[Entry]] = {
    kind.name: kind for kind in (Start, Take, GiveUp, Restart, Stop, End, Probe, Links, Finish)
}


def decode(data: bytes) -> Entry:
    """The entry in the store."""
    fields: dict[str, Any] = json.loads(data)
    kind = _ENTRIES[fields.pop("do")]
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return kind(**values)


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """The state after some entries.

    Attributes:
        number: of entries.
        attempt: the one that runs or has run last; -1 before the first.
        places: id of the host at each place of that attempt.
        size: the number of places at its start.
        taken_over: how many hosts each place had before in this attempt, or was added late.
        given_up: places that stay empty.
        used: restarts and replacements in earlier attempts.
        probed: the key of the last probe of the links in this attempt.
        probe: the one whose result is not known yet.
        excluded: hosts that leave the job because of a broken link, with the reason.
        restart: why the attempt is over; `None` while it runs.
        stop, end: why the job ends.
    """

    number: int = 0
    stage: Stage = Stage.FORMING
    attempt: int = -1
    places: tuple[str, ...] = ()
    size: int = 0
    taken_over: tuple[int, ...] = ()
    given_up: frozenset[int] = frozenset()
    used: int = 0
    probed: str = ""
    probe: Probe | None = None
    excluded: dict[str, str] = dataclasses.field(default_factory=dict)
    restart: Restart | None = None
    stop: Stop | None = None
    end: End | None = None

    def place_of(self, host: str) -> int | None:
        """The place of a host; `None` if it has none."""
        return self.places.index(host) if host in self.places else None

    def apply(self, entry: Entry) -> JobPlan:
        """The state after one more entry."""
        after = self._applied(entry)
        return dataclasses.replace(after, number=self.number + 1)

    def _applied(self, entry: Entry) -> JobPlan:
        replace = dataclasses.replace
        running = self.stage is Stage.RUNNING
        over = self.stage in (Stage.ENDING, Stage.FINISHED)
        if isinstance(entry, Start) and self.stage in (Stage.FORMING, Stage.CLEARING):
            return replace(
                self,
                stage=Stage.RUNNING,
                attempt=entry.attempt,
                places=entry.places,
                size=len(entry.places),
                taken_over=(0,) * len(entry.places),
                given_up=frozenset(),
                used=entry.used,
                probed="",
                probe=None,
                restart=None,
            )
        if isinstance(entry, Take) and running:
            return self._taken(entry)
        if isinstance(entry, GiveUp) and running:
            return replace(self, given_up=self.given_up | set(entry.places))
        if isinstance(entry, Probe) and running and entry.attempt == self.attempt:
            known = entry.key == self.probed
            return self if known else replace(self, probed=entry.key, probe=entry)
        if isinstance(entry, Links) and running and self.probe is not None:
            mine = (self.probe.attempt, self.probe.key) == (entry.attempt, entry.key)
            excluded = {**self.excluded, **entry.excluded}
            return replace(self, probe=None, excluded=excluded) if mine else self
        if isinstance(entry, Restart) and running and entry.attempt == self.attempt:
            return replace(self, stage=Stage.CLEARING, restart=entry)
        if isinstance(entry, Stop) and not over:
            return replace(self, stage=Stage.ENDING, stop=entry)
        if isinstance(entry, End) and not over:
            return replace(self, stage=Stage.ENDING, end=entry)
        if isinstance(entry, Finish) and (running or self.stage is Stage.ENDING):
            return replace(self, stage=Stage.FINISHED)
        return self

    def _taken(self, entry: Take) -> JobPlan:
        if entry.host in self.places or entry.place > len(self.places):
            return self
        places, taken_over = list(self.places), list(self.taken_over)
        if entry.place == len(places):
            places.append(entry.host)
            taken_over.append(1)
        else:
            places[entry.place] = entry.host
            taken_over[entry.place] += 1
        return dataclasses.replace(
            self,
            places=tuple(places),
            taken_over=tuple(taken_over),
            given_up=self.given_up - {entry.place},
        )

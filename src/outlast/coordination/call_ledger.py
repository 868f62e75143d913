"""The one way in which ranks agree: rounds, through a store, without a collective.

    ledger = connect_ledger("restore", group)        # on all ranks, in the same order
    round = ledger.next()                            # the same round on all ranks
    round.finish(b"my part")                         # or round.fail(...)
    verdict = round.await_verdict(timeout)           # all have finished, or why not: once for all
    round.conclude(b"a result of round.parts()")     # on rank 0, the coordinator
    round.await_conclusion(timeout)                  # on all ranks
    round.forget()

Whoever agrees on something builds on this: operations of all ranks (`agreement.py`), the save of a
checkpoint, its copies, background calls, comparisons of what ranks have computed. A round waits
only where it says so, so one thread may have several under way.

Keys of a round, under its prefix:

    name               what the round is for                       the first claim wins
    part/RANK          the result of one rank's part
    part/L/GROUP       those of a group of ranks, on level L of the tree
    count/L/GROUP      how many members of the group have finished
    verdict            how the round ended: done, or failed        the first claim wins
    conclusion         the coordinator's result from the parts
    left/L/GROUP       how many members of the group no longer need the keys

Why one key `verdict`: "all have finished" and "one has failed" can be claimed at the same moment by
different ranks. The store orders the two claims, and all ranks read the one that won. Therefore all
ranks see the same verdict, and a verdict never changes: once "done" is claimed, no rank can fail or
drop the round, and once it has failed, no rank can finish it.

The tree: sixteen ranks are a group, sixteen groups are a group of the next level, and so on up to
one group. A rank puts its part, then adds to the count of its group. The rank whose addition
completes the count finishes for the group: it joins the parts of the members into one record, puts
that, and adds to the count of the group above; at the top it claims "done". So no rank waits in the
tree, and the coordinator reads at most sixteen records, whatever the number of ranks.

Why "done" is never claimed too early: the store puts all operations into one order, so the addition
that completes a count comes after the parts of all members. Each member adds once. A rank that
fails does not add; so if one has failed, its group is never complete, nor is the top, and no rank
claims "done". Only a failure that is found after the rank itself has finished (an abort, a
different name) competes with a claim of "done".

Operations: on average a constant number per rank and round; the last of a group has sixteen more.
The records come from other hosts, so they are JSON, and nothing in them is executed.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from outlast.coordination.stores.store import MemoryStore, Store
from outlast.coordination.waits import waits
from outlast.errors import AsyncCallError
from outlast.system.error_text import describe, traceback_text

DIFFERENT_ORDER = "scheduled in different order on different ranks"
"""How the cause of a failure begins: ranks have announced different calls under one index."""
_WIDTH = 16
"""How many members a group of the tree has. A rank reads that many records one after another."""
_BETWEEN = b"\x1e"
"""Between the parts of two ranks in a record: JSON contains no such byte."""


@dataclasses.dataclass(frozen=True)
class CallFailure:
    """Why a call has failed, as reported by the rank on which it failed."""

    call: int  # its index in the order of scheduling
    name: str  # of the function
    rank: int  # where it failed, in the group of the ledger
    host: str  # the name of that rank's host
    cause: str  # in one line: `ValueError: ...`, `killed by SIGKILL`
    traceback: str = ""  # a killed process leaves none

    @classmethod
    def here(cls, call: int, name: str, rank: int, cause: str, traceback: str = "") -> CallFailure:
        return cls(call, name, rank, socket.gethostname(), cause, traceback)

    @classmethod
    def of(cls, error: BaseException, call: int, name: str, rank: int) -> CallFailure:
        return cls.here(call, name, rank, describe(error), traceback_text(error))

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> CallFailure:
        """The inverse of `encode`; an `AsyncCallError` if `data` is not such a record."""
        try:
            return msgspec.convert(json.loads(data), type=cls)
        except (ValueError, msgspec.ValidationError) as e:
            raise AsyncCallError(f"not a record of a failed call: {data[:200]!r}") from e

    @property
    def text(self) -> str:
        """Where and why, with the traceback."""
        text = f"rank {self.rank} on {self.host}: {self.cause}"
        return f"{text}\n{self.traceback.rstrip()}" if self.traceback else text

    def to_error(self) -> AsyncCallError:
        text = f"background call {self.call} ({self.name}) failed on rank {self.rank} on "
        text += f"{self.host}: {self.cause}"
        return AsyncCallError(f"{text}\n{self.traceback.rstrip()}" if self.traceback else text)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a call ended, for all ranks: all of them are done, or one has failed."""

    failure: CallFailure | None = None

    @property
    def done(self) -> bool:
        return self.failure is None

    def encode(self) -> bytes:
        """As JSON; `{}` for success."""
        return b"{}" if self.failure is None else self.failure.encode()

    @classmethod
    def decode(cls, data: bytes) -> Verdict:
        return cls() if data == b"{}" else cls(CallFailure.decode(data))


class CallLedger:
    """One rank's place among the ranks that agree: it makes their rounds, which all ranks number in
    the same way. A ledger, its children and their rounds share a store; each has its own keys.

    Every method, and those of rounds, raise `StoreError` if the store cannot be reached. Only those
    whose names begin with `await_` wait for other ranks (`None`: without limit); waits on the store
    block nothing else.
    """

    def __init__(self, store: Store, prefix: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._prefix = store, prefix
        self._made = 0
        self._levels = [world_size]  # how many members each level of the tree has
        while self._levels[-1] > _WIDTH:
            self._levels.append(-(-self._levels[-1] // _WIDTH))

    def child(self, name: str) -> CallLedger:
        return CallLedger(self._store, f"{self._prefix}/{name}", self.rank, self.world_size)

    def agree(self, name: str, value: str) -> str:
        """The value of the rank that called this first for `name`, for the life of the ledger."""
        return self._store.claim(f"{self._prefix}/{name}", value.encode()).decode()

    def next(self) -> Round:
        """The next round, in the order in which all ranks take them."""
        self._made += 1
        return self.round(self._made - 1)

    def round(self, index: int, of: str = "") -> Round:
        """The round with this number, of those for one thing if there are several kinds."""
        return Round(self._store, f"{self._prefix}/{of}{index}", index, self.rank, self._levels)


class Round:
    """One rank's part in a round: see the module. Stateless, so threads may share it."""

    def __init__(
        self, store: Store, prefix: str, index: int, rank: int, levels: Sequence[int]
    ) -> None:
        self.index, self.rank, self.world_size = index, rank, levels[0]
        self._store, self._prefix, self._levels = store, prefix, levels

    def announce(self, name: str) -> None:
        """Announces that this rank takes the round for `name`. An `AsyncCallError` if another rank
        takes it for something else: it has failed for all ranks then.
        """
        own = json.dumps({"rank": self.rank, "name": name}, separators=(",", ":")).encode()
        first = json.loads(self._store.claim(self._key("name"), own))
        if first["name"] == name:
            return
        cause = (
            f"{DIFFERENT_ORDER}: call {self.index} is {name!r} on rank {self.rank}, and "
            f"{first['name']!r} on rank {first['rank']}"
        )
        failure = CallFailure.here(self.index, name, self.rank, cause)
        self.fail(failure)
        raise failure.to_error()

    def finish(self, part: bytes | None = None) -> None:
        """Announces that this rank has finished its part. At most once per round, and not if this
        part has failed. `part` is for the coordinator (`parts`): all have one, or none; a
        `ValueError` if it is not UTF-8, or has the character U+001E, as no JSON does.
        """
        if part is not None:
            part.decode()  # some stores take only text: refused for all of them
            if _BETWEEN in part:
                raise ValueError("a part contains the character U+001E")
        member = self.rank
        for level, members in enumerate(self._levels):
            if part:
                self._store.put(self._key(_part(level, member)), part)
            group = member // _WIDTH
            if self._store.add(self._key(f"count/{level}/{group}"), 1) < _size(group, members):
                return
            if part is not None and members > _WIDTH:
                part = _BETWEEN.join(self._read(level, group))
            member = group
        self._store.claim(self._key("verdict"), Verdict().encode())

    def fail(self, failure: CallFailure) -> bool:
        """Claims that the round has failed; returns whether that is now the verdict."""
        verdict = Verdict(failure).encode()
        return self._store.claim(self._key("verdict"), verdict) == verdict

    def verdict(self) -> Verdict | None:
        data = self._store.read(self._key("verdict"))
        return None if data is None else Verdict.decode(data)

    def await_verdict(self, timeout: float | None) -> Verdict:
        """Waits for the verdict of all ranks; a `KeyTimeout` after `timeout` seconds."""
        with waits():
            return Verdict.decode(self._store.wait_for(self._key("verdict"), timeout))

    def parts(self) -> list[bytes]:
        """The parts of a round that is done, in the order of the ranks."""
        return _BETWEEN.join(self._read(len(self._levels) - 1, 0)).split(_BETWEEN)

    def parts_so_far(self) -> list[bytes]:
        """The parts of a round that is not done; empty where there is none. Reads each rank."""
        return [self.part(rank) for rank in range(self.world_size)]

    def part(self, rank: int) -> bytes:
        """The part of one rank, once it has finished; empty once all have called `forget`."""
        return self._store.read(self._key(_part(0, rank))) or b""

    def conclude(self, payload: bytes) -> None:
        """Publishes the result of a round that is done: UTF-8, not empty. By the coordinator."""
        if not payload.decode():
            raise ValueError("the payload of a conclusion is empty")
        self._store.put(self._key("conclusion"), payload)

    def await_conclusion(self, timeout: float | None) -> bytes:
        """Waits for the coordinator's `conclude`; a `KeyTimeout` after `timeout` seconds."""
        with waits():
            return self._store.wait_for(self._key("conclusion"), timeout)

    def pause(self, seconds: float) -> None:
        """Waits for `conclude`, or a `KeyTimeout`: a pause, in which no rank waits for another."""
        self._store.wait_for(self._key("conclusion"), seconds)

    def conclusion(self) -> bytes | None:
        """The coordinator's result; `None` before its `conclude`. Does not wait."""
        return self._store.read(self._key("conclusion"))

    def forget(self) -> None:
        """Announces that this rank will no longer read or write keys of the round: it has the
        verdict, and the conclusion if there is one. At most once per round. The last rank deletes
        the keys, so the store does not grow.
        """
        # The parts of a group were joined, or read by the coordinator, before there was a verdict
        # or conclusion that this rank has. The last member of a group is past the point where any
        # of them reads or sets its keys again.
        member, gone = self.rank, list[str]()
        for level, members in enumerate(self._levels):
            group, size = member // _WIDTH, _size(member // _WIDTH, members)
            if self._store.add(self._key(f"left/{level}/{group}"), 1) < size:
                break
            gone += [_part(level, group * _WIDTH + each) for each in range(size)]
            gone += [f"count/{level}/{group}", f"left/{level}/{group}"]
            member = group
        else:
            gone += ["name", "verdict", "conclusion"]
        if gone:
            self._store.delete(*map(self._key, gone))

    def _read(self, level: int, group: int) -> list[bytes]:
        """The records of the members of a group; each holds the parts of all ranks below it."""
        members = range(group * _WIDTH, min((group + 1) * _WIDTH, self._levels[level]))
        below = _WIDTH**level
        ends = (min((member + 1) * below, self.world_size) for member in members)
        keys = [self._key(_part(level, member)) for member in members]
        found = self._store.read_all(*keys)
        each = zip(found, members, ends, strict=True)
        return [value or _BETWEEN * (end - member * below - 1) for value, member, end in each]

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def _part(level: int, member: int) -> str:
    return f"part/{level}/{member}" if level else f"part/{member}"


def _size(group: int, members: int) -> int:
    return min((group + 1) * _WIDTH, members) - group * _WIDTH


def connect_ledger(purpose: str, group: Any = None) -> CallLedger:
    """A new ledger of the ranks of a process group, on the group's store.

    All ranks call this in the same order; the first call for a group is a collective. All ledgers
    of a group share their connections (`collectives.py`). The default group is used by default.
    Without a group, or with one rank, the ledger is in this process. A `ValueError` if this rank is
    not in the group. A `StoreError` if the group's store cannot be reached.
    """
    from outlast.coordination import collectives

    place = collectives.place_in(group)
    if place is None:
        return CallLedger(MemoryStore(), purpose, 0, 1)
    rank, world_size, _ = place
    store = collectives.shared_store(group)
    prefix = collectives.unique_prefix(purpose, group)
    return CallLedger(store, prefix, rank, world_size)

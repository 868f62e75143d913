"""How the decision that follows an iteration is made, from what the store says.

Why a decision is always made. It depends on facts that are only ever added: arrivals at `term/k`,
the ledger, faults, requests to join and to stop, ranks that are given up. Each process that adds a
fact reads all facts afterwards, and decides if they suffice (`decide`): the member that arrives,
the process that records a loss, the joiner, the one that is told to stop, the launcher. The read
that follows the last fact sees all of them. So no member has to be there to decide, and the members
that wait are woken by the decision alone.

Why one decision is enough. Two processes may decide at the same time, from different facts: the
first claim wins, and every member reads that one record. A fact that the winner had not read was
added after its read: a request counts for the next decision; for a loss, see `membership.py`.

Why a decision is a chain of records: a restart that is held (`Held`) has its note as record 0, and
what follows it as record 1. So all members wait for one key at a time, and know since when the
restart is held. A note is followed by another only if it differs: the launchers have found no
broken link, or a member that waits has been mistaken for lost.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TypeVar

import msgspec

from outlast.coordination import barrier
from outlast.coordination.decision import (
    Decision,
    Facts,
    Held,
    Joiner,
    Reached,
    Rules,
    ViewRecord,
    decode_record,
    encode_record,
    next_record,
)
from outlast.coordination.ops import Link
from outlast.coordination.records import SUSPECTED_LINK, LostRecord, StopRecord, lines
from outlast.events.fault_record import FaultRecord

T = TypeVar("T")

RESTART = b"restart"
COMPLETED = b"completed"
MOVED = b"moved"
GONE = "outlast/gone"
"""The ranks that no launcher replaces, as `give_up` and `take_back` have added them."""


def decision_key(iteration: int, number: int) -> str:
    """The key of one record of the decision about an iteration."""
    return f"decision/{iteration}/{number}"


class Decisions:
    """Reads the facts in the store, and decides what follows from them; see the module.
    `world_size` is the number of members at the start of the job; `rules` are those of this
    process, `None` if it only knows those in the store.
    """

    def __init__(self, link: Link, world_size: int, rules: Rules | None = None) -> None:
        self.link, self.world_size = link, world_size
        self._own_rules = rules
        self._rules: Rules | None = None
        # What this process knows already, and what never changes.
        self._decisions: dict[int, Decision] = {}  # the last two
        self._started: tuple[int, bytes | None] = -1, None  # the end of its barrier

    async def rules(self) -> Rules:
        """The rules of the call: those of the process that was first."""
        if self._rules is None:
            if self._own_rules is None:
                data = await self.link.read("rules")
            else:
                data = await self.link.claim("rules", msgspec.json.encode(self._own_rules))
            self.know_rules(data)
        return self._rules or Rules()  # no member has registered yet

    def know_rules(self, data: bytes | None) -> None:
        """`data` is what stands under `rules`, if anything does."""
        if data is not None:
            self._rules = msgspec.json.decode(data, type=Rules)

    async def joiners(self) -> list[Joiner]:
        return _records(Joiner, await self.link.read("joins"))

    async def current(self) -> int:
        iteration = int(await self.link.read("current") or b"0")
        while await self.decision(iteration + 1) is not None:
            iteration += 1
        return iteration

    async def decision(self, iteration: int) -> Decision | None:
        """The decision with which the iteration starts; `None` before it is made."""
        number = 0
        while iteration not in self._decisions:
            # Two at once: after a death, a note that the restart is held comes first.
            keys = decision_key(iteration, number), decision_key(iteration, number + 1)
            for data in await self.link.read_all(*keys):
                if data is None:
                    return None
                record = decode_record(data)
                if isinstance(record, Decision):
                    self.follow(record)
                    return record
            number += 2
        return self._decisions[iteration]

    async def view(self, iteration: int) -> ViewRecord | None:
        decision = await self.decision(iteration)
        return None if decision is None else decision.view

    def follow(self, decision: Decision) -> None:
        self._decisions[decision.view.iteration] = decision
        while len(self._decisions) > 2:
            del self._decisions[min(self._decisions)]

    def started(self, iteration: int, done: bytes) -> None:
        self._started = iteration, done

    async def decide(
        self, iteration: int, after: Reached, expired: Held | None = None
    ) -> Decision | Held | None:
        """Decides what follows the iteration, or a note that it waits; `None` if a member is still
        in it. Call it after every change of a fact: `after` says which. `expired` is a wait that
        has lasted too long.
        """
        facts, data = await self._facts(iteration)
        if facts is None:
            return None
        record: Decision | Held | None = None
        last, number = None, 0
        while True:
            if data is not None:
                claimed = decode_record(data)
                if isinstance(claimed, Decision):
                    return claimed
                last = claimed
                number += 1
            if record is None or record != last:
                record = await self._next_record(facts, last, expired)
            if isinstance(record, Decision):
                record = dataclasses.replace(record, reached=after)
            key = decision_key(iteration + 1, number)
            if record == last:
                data = await self.link.read(key)
                if data is None:
                    return record
            else:
                data = await self.link.claim(key, encode_record(record))

    async def _next_record(
        self, facts: Facts, last: Held | None, expired: Held | None
    ) -> Decision | Held:
        iteration, rules = facts.before.view.iteration, await self.rules()
        if len(facts.present) < rules.await_size:
            # A launcher gives up the ranks that are lost once it knows of a request to stop. So
            # that is read after the ranks: without it, the job would end as if nobody had asked.
            given_up = await self.given_up()
            stop = await self.stop_request()
            facts = dataclasses.replace(facts, given_up=given_up, stop=stop)
        record = next_record(facts, rules, last, expired)
        if isinstance(record, Held) and record.links:
            if await self.link.read(f"links/{iteration}") is not None:
                facts = dataclasses.replace(facts, links_known=True)
                record = next_record(facts, rules, last, expired)
            elif record != last:
                key = f"{self.link.prefix}links/{iteration}"
                await self.link.at("").put(SUSPECTED_LINK, key.encode())
        if isinstance(record, Held) and record.size is not None:
            size = json.dumps(dataclasses.asdict(record.size)).encode()
            await self.link.put("size", size)
        return record

    async def _facts(self, iteration: int) -> tuple[Facts | None, bytes | None]:
        """What a decision depends on, `None` while a member is left, or if nothing follows; and
        the first record of the decision, if it is there.
        """
        before = await self.decision(iteration)
        if before is None or before.ends:
            return None, None
        logs = f"term/{iteration}/arrived", barrier.LEDGER, f"fault/{iteration}", "joins"
        keys = [*logs, "stop", f"over/{iteration}", decision_key(iteration + 1, 0)]
        if iteration != self._started[0]:
            keys.append(barrier.done_key(f"start/{iteration}"))
        log, losses, failed, joins, stop, over, first, *done = await self.link.read_all(*keys)
        if done and done[0] is not None:
            self.started(iteration, done[0])
        arrived, ledger = barrier.arrivals(log), _records(LostRecord, losses)
        lost = {record.member for record in ledger}
        if before.view.expected - arrived.keys() - lost:
            return None, None
        if not arrived and over == COMPLETED:
            return None, None  # its members have ended since
        faults = _records(FaultRecord, failed)
        roster, world_size = await self.roster(before)
        # One that succeeds a member which is still there takes no part yet.
        joiners = [j for j in _records(Joiner, joins) if j.succeeds < 0 or j.succeeds in lost]
        request = None if stop is None else await self.stop_request()
        found = before, roster, world_size, arrived, ledger, faults, joiners, request
        return Facts(*found, grows=over == MOVED), first

    async def over(self, iteration: int) -> bytes | None:
        return await self.link.read(f"over/{iteration}")

    async def faults(self, iteration: int) -> list[FaultRecord]:
        return _records(FaultRecord, await self.link.read(f"fault/{iteration}"))

    async def ledger(self) -> list[LostRecord]:
        return _records(LostRecord, await self.link.read(barrier.LEDGER))

    async def roster(self, decision: Decision) -> tuple[dict[int, int], int]:
        """The member at each rank, and the world size: as announced, or else as decided."""
        name, (iteration, done) = f"start/{decision.view.iteration}", self._started
        if iteration != decision.view.iteration:
            done = await self.link.read(barrier.done_key(name))
        arrived = await barrier.log(self.link, name) if done is None else barrier.summary(done)
        if not arrived:
            slots = decision.view.slots()
            return {r: m for r, m in enumerate(slots) if m is not None}, len(slots)
        places = {record["rank"]: member for member, record in arrived.items()}
        return places, max(record["world_size"] for record in arrived.values())

    async def stop_request(self) -> StopRecord | None:
        data = await self.link.read("stop")
        if data is None:
            return None
        done = await self.link.read("stopped") or b""
        return dataclasses.replace(StopRecord(**json.loads(data)), done=done.decode())

    async def given_up(self) -> frozenset[int]:
        """The ranks that no launcher replaces; empty without a launcher that says so."""
        gone: set[int] = set()
        for line in (await self.link.at("").read(GONE) or b"").splitlines():
            record = json.loads(line)
            if isinstance(record, dict):
                gone.difference_update(record["back"])
            else:
                gone.update(record)
        return frozenset(gone)


def _records(kind: type[T], data: bytes | None) -> list[T]:
    return [kind(**record) for record in lines(data)]

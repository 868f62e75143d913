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
from typing import Any

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

RESTART = b"restart"
COMPLETED = b"completed"
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
        self._decision: Decision | None = None
        self._started: tuple[int, dict[int, dict[str, Any]]] = -1, {}

    async def rules(self) -> Rules:
        """The rules of the call: those of the process that was first."""
        if self._rules is None:
            if self._own_rules is None:
                data = await self.link.read("rules")
            else:
                data = await self.link.claim("rules", msgspec.json.encode(self._own_rules))
            if data is None:
                return Rules()  # no member has registered yet
            self._rules = msgspec.json.decode(data, type=Rules)
        return self._rules

    async def joiners(self) -> list[Joiner]:
        return [Joiner(**record) for record in lines(await self.link.read("joins"))]

    async def current(self) -> int:
        iteration = int(await self.link.read("current") or b"0")
        while await self.decision(iteration + 1) is not None:
            iteration += 1
        return iteration

    async def decision(self, iteration: int) -> Decision | None:
        """The decision with which the iteration starts; `None` before it is made."""
        known = self._decision
        if known is not None and known.view.iteration == iteration:
            return known
        number = 0
        while True:
            data = await self.link.read(decision_key(iteration, number))
            record = None if data is None else decode_record(data)
            if not isinstance(record, Held):
                return record
            number += 1

    async def view(self, iteration: int) -> ViewRecord | None:
        decision = await self.decision(iteration)
        return None if decision is None else decision.view

    def follow(self, decision: Decision) -> None:
        self._decision = decision

    def started(self, iteration: int, arrived: dict[int, dict[str, Any]]) -> None:
        self._started = iteration, arrived

    async def decide(
        self, iteration: int, after: Reached, expired: Held | None = None
    ) -> Decision | Held | None:
        """Decides what follows the iteration, or a note that it waits; `None` if a member is still
        in it. Call it after every change of a fact: `after` says which. `expired` is a wait that
        has lasted too long.
        """
        last: Held | None = None
        number = 0
        while (record := await self._next_record(iteration, last, expired)) is not None:
            if isinstance(record, Decision):
                record = dataclasses.replace(record, reached=after)
            key = decision_key(iteration + 1, number)
            if record == last:
                data = await self.link.read(key)
                if data is None:
                    return record
            else:
                data = await self.link.claim(key, encode_record(record))
            claimed = decode_record(data)
            if isinstance(claimed, Decision):
                return claimed
            last = claimed
            number += 1
        return None

    async def _next_record(
        self, iteration: int, last: Held | None, expired: Held | None
    ) -> Decision | Held | None:
        facts = await self._facts(iteration)
        if facts is None:
            return None
        rules = await self.rules()
        if len(facts.present) < rules.await_size:
            facts = dataclasses.replace(facts, given_up=await self.given_up())
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

    async def _facts(self, iteration: int) -> Facts | None:
        """What a decision depends on; `None` while a member is left, or if nothing follows."""
        before = await self.decision(iteration)
        if before is None or before.ends:
            return None
        arrived = await barrier.log(self.link, f"term/{iteration}")
        ledger = await self.ledger()
        if before.view.expected - arrived.keys() - {record.member for record in ledger}:
            return None
        if not arrived and await self.over(iteration) == COMPLETED:
            return None  # its members have ended since
        faults = await self.faults(iteration)
        roster, world_size = await self.roster(before)
        joiners, stop = await self.joiners(), await self.stop_request()
        return Facts(before, roster, world_size, arrived, ledger, faults, joiners, stop)

    async def over(self, iteration: int) -> bytes | None:
        return await self.link.read(f"over/{iteration}")

    async def faults(self, iteration: int) -> list[FaultRecord]:
        data = await self.link.read(f"fault/{iteration}")
        return [FaultRecord(**record) for record in lines(data)]

    async def ledger(self) -> list[LostRecord]:
        return [LostRecord(**record) for record in lines(await self.link.read(barrier.LEDGER))]

    async def roster(self, decision: Decision) -> tuple[dict[int, int], int]:
        """The member at each rank, and the world size: as announced, or else as decided."""
        iteration, arrived = self._started
        if iteration != decision.view.iteration:
            name = f"start/{decision.view.iteration}"
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

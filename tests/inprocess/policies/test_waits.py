"""What a restart says that is held for replacements."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Coroutine
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from fake_clock import FakeClock
from outlast.coordination.decision import Decision, Rules, ViewRecord, encode_record
from outlast.coordination.membership import MembershipProtocol, decision_key
from outlast.coordination.ops import Link, Op, drive, perform_on
from outlast.coordination.records import LostRecord
from outlast.coordination.stores.store import KeyTimeout, MemoryStore
from outlast.errors import RankLostError
from outlast.inprocess.recovery.waits import leave_iteration
from outlast.inprocess.timeouts import Timeouts


class Held:
    """Member 0 of a job of `size`, whose other members are lost. Time passes when it waits."""

    def __init__(self, size: int, unreplaced: frozenset[int] = frozenset()) -> None:
        self.clock, self.store = FakeClock(), MemoryStore()
        self.link, self.view = Link("call/"), ViewRecord(0, tuple(range(size)))
        self.membership = MembershipProtocol(self.link, size, Rules(await_size=size))
        first = Decision(self.view, unreplaced=unreplaced)
        self(self.link.put(decision_key(0, 0), encode_record(first)))
        self(self.membership.rules())
        for member in range(1, size):
            self.lose(member)

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return drive(work, self.perform)

    def perform(self, op: Op) -> Any:
        if op.name == "wait_for" and op.key not in self.store.table:
            self.wait(op)
        return perform_on(self.store)(op)

    def wait(self, op: Op) -> None:
        self.clock.advance(op.timeout or 0.0)
        raise KeyTimeout(op.key)

    def lose(self, member: int) -> None:
        self(self.membership.report_lost(LostRecord(member, "its host was lost"), 0))

    def leave(self) -> Decision:
        host: Any = SimpleNamespace(
            durations=dataclasses.replace(Timeouts().in_seconds(), barrier=1.0, hold=60.0),
            clock=self.clock,
            timing=lambda name: nullcontext(),
            progress=lambda: {"step": 0, "pings": 0, "least": 2},
            keeps=False,
        )
        decision: Decision = self(leave_iteration(self.membership, host, self.view, 0))
        return decision


def test_only_ranks_that_may_come_back_are_said_to_be_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    held = Held(4, unreplaced=frozenset({3}))  # an earlier restart has waited for rank 3
    held(held.membership.give_up(frozenset({2})))
    decision = held.leave()
    assert decision.unreplaced == {1, 2, 3}
    assert decision.view.expected == {0}
    assert held.clock.now() == 60.0
    assert "waits for replacements of the ranks 1, for another 55.00 s at most" in caplog.text
    assert "has waited 60.00 s for replacements" in caplog.text
    size = held(held.membership.size())
    assert (size.ranks, size.least) == (1, 2)


def test_a_member_that_is_mistaken_for_lost_while_it_waits_leaves_at_once() -> None:
    held = Held(2)
    held.wait = lambda op: held.lose(0)  # type: ignore[method-assign]
    with pytest.raises(RankLostError, match="count this one as lost: its host was lost"):
        held.leave()
    assert held.clock.now() == 0.0

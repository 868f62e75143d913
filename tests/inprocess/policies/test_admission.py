"""What a restart says that is held for replacements."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from fake_clock import FakeClock
from outlast.coordination import barrier
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, Op, drive, perform_on
from outlast.coordination.records import LostRecord
from outlast.coordination.stores.memory_store import MemoryStore
from outlast.coordination.stores.store import KeyTimeout
from outlast.inprocess.recovery.admission import hold_for_replacements
from outlast.inprocess.recovery.host_protocol import Limits


def test_only_ranks_that_may_come_back_are_said_to_be_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock, perform_now = FakeClock(), perform_on(MemoryStore())

    def perform(op: Op) -> Any:
        if op.name == "wait_for":
            clock.advance(op.timeout or 0.0)
            raise KeyTimeout(op.key)
        return perform_now(op)

    link = Link("call/")
    membership = MembershipProtocol(link, 4)
    for member in range(4):
        arrive = barrier.arrive(
            link, "start/0", member, frozenset(range(4)), rank=member, world_size=4
        )
        drive(arrive, perform)
    for member in (1, 2, 3):
        drive(membership.report_lost(LostRecord(member, "its host was lost"), 0), perform)
    drive(membership.give_up(frozenset({2})), perform)
    limits = Limits(barrier=1.0, completion=1.0, await_size=4, await_seconds=60.0)
    host: Any = SimpleNamespace(limits=limits, clock=clock, least_ranks=lambda: 2)
    in_vain = frozenset({3})  # an earlier restart has waited for it
    assert drive(hold_for_replacements(membership, host, 0, 0, in_vain), perform) == {1, 2, 3}
    assert "waits for replacements of the ranks 1, for another 55.00 s at most" in caplog.text

"""A request to stop is known to each decision that could end the job without it."""

from __future__ import annotations

import signal
from collections.abc import Coroutine
from typing import Any

import pytest

from outlast.coordination.deciding import GONE
from outlast.coordination.decision import Rules
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.records import LostRecord, StopRecord, to_line
from outlast.coordination.stores.store import MemoryStore

STOP = StopRecord("rank 0 on node: signal SIGTERM", 143)


class Overtaken(MemoryStore):
    """Before the ranks that are given up are read, a rank requests a stop; so the launcher, which
    reads this, gives up the lost rank.
    """

    def read(self, key: str) -> bytes | None:
        if key == GONE and key not in self.table:
            self.table["stop"], self.table[GONE] = to_line(STOP), b"[1]\n"
        return super().read(key)


def call_on(store: MemoryStore) -> tuple[Any, MembershipProtocol]:
    def call(step: Coroutine[Any, Any, Any]) -> Any:
        return drive(step, perform_on(store))

    return call, MembershipProtocol(Link(), 2, Rules(await_size=2))


def test_a_rank_is_given_up_because_of_a_stop() -> None:
    call, membership = call_on(Overtaken())
    call(membership.register(0, "a"))
    call(membership.report_lost(LostRecord(1, "killed"), 0))
    view = call(membership.view(0))
    call(membership.leave(0, 0, view.expected, {}))
    assert call(membership.view(1)).stop == STOP


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_to_the_launcher_is_a_request_if_the_training_says_so(number: int) -> None:
    call, membership = call_on(MemoryStore())
    call(membership.request_stop_by(number, "early"))
    call(membership.note_stop_signals([signal.SIGTERM, signal.SIGINT], 75))
    assert call(membership.stop_request()) is None
    call(membership.request_stop_by(number, "to the launcher"))
    told = None if number == signal.SIGQUIT else StopRecord("to the launcher", 75)
    assert call(membership.stop_request()) == told


def test_a_training_that_is_over_is_not_told_to_stop() -> None:
    call, membership = call_on(MemoryStore())
    call(membership.note_stop_signals([signal.SIGTERM], 143))
    call(membership.note_stop_signals((), 143))
    call(membership.request_stop_by(signal.SIGTERM, "to the launcher"))
    assert call(membership.stop_request()) is None

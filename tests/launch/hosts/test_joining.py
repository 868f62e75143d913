"""`Joining` of one endpoint, with a model of the connections and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.clock import FakeClock
from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.quorum import Configuration, Voters
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.replicated.endpoints import Endpoint
from outlast.launch.hosts.replicated.founding import SILENCE_S
from outlast.launch.hosts.replicated.joining import Joining
from outlast.launch.hosts.replicated.messages import (
    AskGrant,
    Find,
    Grant,
    Member,
    Message,
    NotYet,
)
from outlast.launch.hosts.replicated.past import Config, Group, Past

LOST_AFTER_S = 6.0
ENDPOINTS = [Endpoint(f"10.0.0.{i}", 29400, (f"10.0.0.{i}", 29400)) for i in range(3)]


class Peer:
    """The other end of a connection."""

    def __init__(self, index: int, port: int = 29400, name: str = "") -> None:
        name = name or f"h{index}"
        self.host = HostInfo(id=name, name=name, address=f"10.0.0.{index}", port=port)
        self.connection = SimpleNamespace(ended_by_peer=False)
        self.got: list[Message] = []

    def send(self, message: Message) -> None:
        self.got.append(message)


class Third:
    """The third endpoint."""

    def __init__(self, loop: EventLoop, clock: FakeClock) -> None:
        self.results: list[Any] = []
        self.sent: list[tuple[Any, Message]] = []
        self._loop, self._clock = loop, clock
        self.record: Any = SimpleNamespace(past=Past(), durable=True)
        self.record.set = lambda past: setattr(self.record, "past", past)
        peers: Any = SimpleNamespace(
            refusals={},
            failure=lambda address: "",
            not_proved=lambda address: False,
            send_to=lambda address, message: self.sent.append((address, message)),
        )
        self.joining = Joining(
            loop,
            peers,
            ENDPOINTS,
            2,
            HostInfo(id="h2", name="h2", address="10.0.0.2", port=29400),
            LOST_AFTER_S,
            self.record,
            lambda: self.results.append("founded"),
            lambda peer, admitted: self.results.append("admitted"),
            self.results.append,
        )

    def receive(self, peer: Any, message: Message) -> None:
        self.joining.receive(peer, message)

    def ended(self, peer: Any) -> None:
        self.joining.ended(peer)

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)
        self._loop.call_later(0.0, lambda: None)
        self._loop.run_once()


@pytest.fixture
def third() -> Iterator[Third]:
    clock = FakeClock(start=100.0)
    with EventLoop(clock=clock) as loop:
        third = Third(loop, clock)
        yield third
        third.joining.close()


def test_a_grant_is_released_when_its_holder_has_ended(third: Third) -> None:
    first, second = Peer(0), Peer(1)
    third.receive(second, AskGrant(1, 1, Past()))
    assert second.got == [Grant(2, 1)]
    third.ended(second)  # the network fails: the holder may have founded the group
    third.advance(10 * SILENCE_S)
    third.receive(first, AskGrant(0, 1, Past()))
    assert first.got == []
    second.connection.ended_by_peer = True
    third.ended(second)
    third.receive(first, AskGrant(0, 1, Past()))
    assert first.got == []  # it would have announced its group by now only if it lived
    third.advance(LOST_AFTER_S)
    third.receive(first, AskGrant(0, 1, Past()))
    assert first.got == [Grant(2, 1)]


def test_news_of_a_group_ends_the_founding(third: Third) -> None:
    leader = HostInfo(id="l", name="l", address="10.0.0.9", port=1)
    third.receive(Peer(1), Member("g", 1, leader, hosts=3))
    third.advance(2 * SILENCE_S)
    assert third.results == []
    assert third.sent[-1][0] == ("10.0.0.9", 1)


def test_a_host_that_may_not_join_yet_gives_up_after_the_limit(third: Third) -> None:
    leader = Peer(9)
    third.receive(leader, NotYet("an agent has this address", limit_s=5.0))
    third.advance(4.0)
    third.receive(leader, NotYet("an agent has this address", limit_s=5.0))
    assert third.results == []
    third.advance(2.0)
    third.receive(leader, NotYet("an agent has this address", limit_s=5.0))
    assert third.results == ["an agent has this address"]


def test_a_member_that_names_this_host_as_the_leader_is_not_asked(third: Third) -> None:
    was = HostInfo(id="h2-before", name="h2", address="10.0.0.2", port=29400)
    third.receive(Peer(1), Member("g", 1, was, hosts=3))
    third.advance(2 * SILENCE_S)
    assert [message for where, message in third.sent if where == ("10.0.0.2", 29400)] == []


def test_a_leader_that_admits_nobody_is_given_up(third: Third) -> None:
    leader = HostInfo(id="l", name="l", address="10.0.0.9", port=1)
    third.receive(Peer(1), Member("g", 1, leader, hosts=3))
    for _ in range(60):
        third.advance(0.25)
    assert third.sent[-1][0] != ("10.0.0.9", 1)


@pytest.mark.parametrize(
    ("was_at", "is_at", "proves"),
    [
        pytest.param(29400, 29400, True, id="the next agent of an endpoint"),
        pytest.param(29400, 29401, False, id="another agent at the address of an endpoint"),
        pytest.param(40000, 50000, True, id="the next agent of a host that is no endpoint"),
    ],
)
def test_the_agent_that_follows_another_proves_that_it_has_ended(
    third: Third, was_at: int, is_at: int, proves: bool
) -> None:
    config = Config(0, Voters(Configuration(frozenset(["before"]))))
    group = Group("before", 1, config, addresses={"before": ("10.0.0.1", was_at)})
    third.record.past = Past((group,), generation=1)
    for _ in range(3):
        third.receive(Peer(1, is_at, "after"), Find(Past()))
        third.advance(LOST_AFTER_S)
    assert (third.record.past.groups == ()) is proves

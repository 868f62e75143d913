"""`Joining` of one endpoint, with a model of the connections and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fake_clock import FakeClock
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
            failure=lambda address: "",
            differs=lambda address: False,
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


def test_a_grant_is_kept_until_the_address_of_its_holder_tells_news(third: Third) -> None:
    first, second, restarted = Peer(0), Peer(1), Peer(1)
    third.receive(first, AskGrant(0, 1, Past(), sure=False))  # binds nobody
    third.receive(second, AskGrant(1, 1, Past(), sure=False))
    third.receive(second, AskGrant(1, 1, Past(), sure=True))
    assert second.got == [Grant(2, 1, sure=False), Grant(2, 1, sure=True)]
    third.advance(10 * LOST_AFTER_S)
    for sure in (False, True):
        third.receive(first, AskGrant(0, 1, Past(), sure))
    assert first.got == [Grant(2, 1, sure=False)]
    assert "waits for 10.0.0.1:29400" in third.joining.problem()
    restarted.host = HostInfo(id="again", name="h1", address="10.0.0.1", port=29400)
    third.receive(restarted, Find(Past(out=frozenset(["h1"]))))
    third.receive(first, AskGrant(0, 1, Past(), sure=True))
    assert first.got[1:] == [Grant(2, 1, sure=True)]


def test_a_candidate_asks_for_grants_when_a_quorum_would_give_them(third: Third) -> None:
    third.advance(LOST_AFTER_S)

    def asked() -> list[bool]:
        return [m.sure for where, m in third.sent if isinstance(m, AskGrant)]

    assert set(asked()) == {False}
    third.receive(Peer(1), Grant(1, 1, sure=False))
    assert asked()[-1]
    assert third.results == []
    third.receive(Peer(1), Grant(1, 1, sure=True))
    assert third.results == ["founded"]


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

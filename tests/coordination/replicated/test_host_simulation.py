"""The replicated store in the simulation of hosts, and mutations that the simulation must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inprocess.mutations import simulation_finds
from outlast.coordination.replicated.leader import Leader
from outlast.coordination.replicated.node import Node
from outlast.coordination.replicated.own_host import OwnRequests
from outlast.coordination.replicated.quorum import Configuration, Timing
from outlast.coordination.replicated.read_leases import ReadLeases
from outlast.coordination.replicated.serving import HostLeases, Serving
from outlast.coordination.replicated.table import Table
from outlast.coordination.replicated.voter import Voter
from simulation.hosts.schedule import HostSchedule
from simulation.hosts.simulate import HostsResult, simulate_hosts

_CHUNK = 500


def _vary(results: list[HostsResult]) -> None:
    """The schedules are varied: leaders change, hosts are lost and leave, some runs end."""
    assert sum(r.leaders > 1 for r in results) > len(results) / 4
    assert sum(r.lost > 0 for r in results) > len(results) / 5
    assert sum(r.left > 0 for r in results) > len(results) / 10
    assert sum(r.sometimes.get("Snapshot", 0) > 3 for r in results) > len(results) / 4
    assert sum(r.failed > 0 for r in results) > len(results) / 10
    assert sum(r.progress for r in results) > len(results) / 3
    reached = {name for r in results for name, count in r.sometimes.items() if count}
    assert reached >= {
        *("pre-vote granted", "pre-vote denied", "vote granted", "vote denied", "entries refused"),
        *("Refusal", "Handover", "Leave", "Announce", "read lease"),
    }


def test_no_schedule_breaks_what_must_hold() -> None:
    _vary([simulate_hosts(seed) for seed in range(60)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.exhaustive] if first > 1000 else [])
        for first in range(100, 10_100, _CHUNK)
    ],
)
def test_no_schedule_of_many_breaks_what_must_hold(first: int) -> None:
    _vary([simulate_hosts(seed) for seed in range(first, first + _CHUNK)])


def test_the_same_seed_gives_the_same_run() -> None:
    for seed in range(5):
        assert simulate_hosts(seed) == simulate_hosts(seed)


def test_without_faults_one_leader_answers_everything() -> None:
    quiet = HostSchedule(hosts=4, crashes=0, pauses=0, cuts=0, joins=0, faults_s=5.0)
    for seed in range(5):
        result = simulate_hosts(seed, quiet)
        assert (result.leaders, result.lost, result.left, result.failed) == (1, 0, 0, 0)
        assert result.progress


# Each: the function, a text in its source, and the replacement.
MUTATIONS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a voter votes twice in a term": (
        Voter.answer_vote,
        "and self.voted_for in (None, sender)",
        "",
    ),
    "a voter forgets the leader that it hears": (
        Voter.hears_leader,
        "now < self.heard + self.timing.sticky",
        "False",
    ),
    "a vote for a log that lacks entries": (
        Voter.answer_vote,
        "(asked.last_term, asked.last_index) >= (self.log.last_term, self.log.last)",
        "True",
    ),
    "half of the voters are a quorum, whichever half": (
        Configuration.is_quorum,
        "2 * sum(self._weights.get(voter, 0) for voter in set(voters)) > self._total",
        "2 * len(self.voters.intersection(voters)) >= len(self.voters)",
    ),
    "voters change without a joint phase": (
        Leader._change_voters,
        "Voters(wanted, voters.new)",
        "Voters(wanted)",
    ),
    "half of the voters commit": (
        Configuration.reached_by_quorum,
        "2 * weights > self._total",
        "2 * weights > self._total - 2",
    ),
    "lost hosts stay voters": (
        Leader._change_voters,
        "if name not in voter.table.gone",
        "",
    ),
    "a repeated write is performed again": (
        Table.write,
        "results[number] = session.answers[number]",
        "results[number] = session.answers.pop(number)",
    ),
    "a read needs no lease": (Serving.take, "elif lease_valid:", "else:"),
    "a host is lost when its lease is over by the leader's clock": (
        Timing.lost_after.fget,  # type: ignore[attr-defined]
        "self.lease * (1 + self.margin)",
        "self.lease",
    ),
    "a late copy of an answered write is performed": (
        Table.write,
        "if number <= session.floor:",
        "if False:",
    ),
    "a snapshot has no answers": (
        Voter._install,
        "Table(snapshot.table)",
        "Table(type(snapshot.table)(snapshot.table.keys, "
        "{h: type(s)(s.floor) for h, s in snapshot.table.sessions.items()}, snapshot.table.gone))",
    ),
    "a host takes the number of a decision": (Table._extend_chain, "in self.keys", "in ()"),
    "a lost host may write": (Table.remove, "del self.sessions[lost.host]", "pass"),
    "a leader answers before its term has begun": (
        Leader.ready.fget,  # type: ignore[attr-defined]
        "self._voter.applied >= self._first",
        "True",
    ),
    "a new leader counts from before its election": (
        HostLeases.begin,
        "self._heard[host] = self._elected\n",
        "self._heard[host] = self._elected - 0.9 * self._timing.lease\n",
    ),
    "a leader without a quorum goes on": (
        Leader.lease_valid,
        "return now < self._lease[1]",
        "return True",
    ),
    "a late message cuts the log": (
        Voter._accept,
        "or log.term(index) == entry.term",
        "",
    ),
    "a voter does not compare the entry before": (
        Voter._accept,
        "log.term(previous) != append.prev_term",
        "False",
    ),
    "a write is not repeated": (
        OwnRequests.message,
        "pending.due = now + pending.delay",
        "pending.due = now + 1000",
    ),
    "a covered key is told of before all read leases count it": (
        Serving._answer,
        "not self._read_leases.settled",
        "False",
    ),
    "a new leader counts on what was confirmed to another": (
        ReadLeases.begin,
        "self._recall(table.state.covered)",
        "self.covered, self.settled = table.state.covered, True",
    ),
    "a new leader does not know who has a read lease": (
        ReadLeases.begin,
        "& table.sessions.keys()",
        "& {self._me}",
    ),
    "a host that does not confirm is given up": (
        ReadLeases.to_tell,
        "return sorted(self._behind)",
        "behind, self._behind, self.settled = self._behind, set(), True; return behind",
    ),
    "the leader's own host learns last": (
        Node._apply,
        "self.host.learn(self._voter.table.state.covered)",
        "pass",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if number % 3 else ())
        for number, name in enumerate(MUTATIONS)
    ],
)
def test_the_simulation_of_hosts_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation_finds(monkeypatch, MUTATIONS[name], simulate_hosts, 1_500)

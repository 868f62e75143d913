"""Which endpoint founds the group: `Founding` driven by a model of the endpoints."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.coordination.replicated.quorum import Configuration, Voters
from outlast.launch.hosts.replicated.founding import SILENCE_S, STALE_S, Founding
from outlast.launch.hosts.replicated.past import Config, Group, Past

LOST_AFTER_S = 6.0


class MemoryRecord:
    """A `Record` whose file is this object."""

    def __init__(self, past: Past | None = None, *, durable: bool = True) -> None:
        self.past = past or Past()
        self.durable = durable

    def set(self, past: Past) -> None:
        self.past = past


def founding(
    count: int, own: int, began: float = 0.0, record: MemoryRecord | None = None
) -> Founding:
    made: Any = record or MemoryRecord()
    return Founding(count, own, f"h{own}", began, LOST_AFTER_S, made)


def asked(part: Founding, endpoint: int, attempt: int, past: Past | None = None) -> bool:
    host = f"h{endpoint}"
    return part.asked(endpoint, attempt, host, (f"10.0.0.{endpoint}", 1), past or Past())


def group(*voters: str, index: int = 1, founder: str = "g") -> Group:
    tiebreaker = voters[0] if len(voters) % 2 == 0 else None
    configuration = Configuration(frozenset(voters), tiebreaker)
    where = {voter: (f"10.0.0.{voter[1:]}", 1) for voter in voters}
    return Group(founder, 1, Config(index, Voters(configuration)), addresses=where)


def test_one_endpoint_founds_after_the_silence() -> None:
    part = founding(1, 0, began=10.0)
    assert not part.candidate(10.0 + SILENCE_S - 0.01)
    assert part.candidate(10.0 + SILENCE_S)
    assert part.founds()


def test_the_silence_is_that_of_a_lost_host_unless_all_are_there_and_remember() -> None:
    part = founding(3, 0)
    part.is_fresh(1, now=SILENCE_S)
    assert not part.candidate(SILENCE_S)  # the third may be in a group
    part.is_fresh(2, now=SILENCE_S)
    assert part.candidate(SILENCE_S)
    forgetful = founding(1, 0, record=MemoryRecord(durable=False))
    assert not forgetful.candidate(LOST_AFTER_S - 0.01)
    assert forgetful.candidate(LOST_AFTER_S)


def test_news_of_a_group_begins_the_silence_again() -> None:
    part = founding(1, 0, began=10.0)
    part.heard_of_group(11.0)
    assert not part.candidate(11.0 + SILENCE_S - 0.01)


def test_an_endpoint_leaves_it_to_one_with_a_lower_index() -> None:
    part = founding(3, 1)
    now = LOST_AFTER_S
    part.is_fresh(0, now)
    part.is_fresh(2, now)
    assert not part.candidate(now)
    assert part.candidate(now + STALE_S)


@pytest.mark.parametrize(("count", "needed"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_the_first_endpoint_needs_a_quorum(count: int, needed: int) -> None:
    part = founding(count, 0)
    for other in range(1, count):
        assert part.founds() == (other > needed)
        part.granted(other, part.attempt)
    assert part.founds()


def test_a_grant_is_given_once_and_outlives_the_process() -> None:
    record = MemoryRecord()
    part = founding(3, 2, record=record)
    assert asked(part, 1, attempt=1)
    assert asked(part, 1, attempt=1)  # again: its answer was lost
    assert not asked(part, 0, attempt=1)
    assert not part.candidate(LOST_AFTER_S)
    again = founding(3, 2, record=record)
    assert not asked(again, 0, attempt=1)
    assert not again.candidate(LOST_AFTER_S)
    part.learned(Past(withdrawn={"h1": 0}))  # of an earlier attempt
    assert not asked(part, 0, attempt=1)
    before = record.past
    part.learned(Past(withdrawn={"h1": 1}))
    assert not asked(part, 1, attempt=1)  # an old message
    part.learned(before)  # another endpoint, which does not know yet
    assert not record.past.groups
    assert asked(part, 0, attempt=1)


def test_a_grant_ends_with_its_holder_and_all_that_it_took_in() -> None:
    part = founding(3, 2)
    assert asked(part, 1, attempt=1)
    part.learned(Past(groups=(group("h1", "h8", "h9", founder="h1"),)))
    part.learned(Past(out=frozenset(["h1"])))
    assert not asked(part, 0, attempt=1)
    part.learned(Past(out=frozenset(["h9"])))
    assert asked(part, 0, attempt=1)


def test_what_others_tell_of_its_own_grants_does_not_keep_an_endpoint_from_founding() -> None:
    """Two of five endpoints are there, until a third one comes."""
    candidate, other, third = (founding(5, i) for i in range(3))
    assert not candidate.founds()
    assert asked(other, 0, attempt=1)
    candidate.granted(1, attempt=1)
    candidate.learned(other._record.past)
    assert candidate.candidate(LOST_AFTER_S)
    third.learned(other._record.past)
    assert asked(third, 0, attempt=1)
    candidate.granted(2, attempt=1)
    assert candidate.founds()


def test_a_grant_of_an_earlier_process_can_be_withdrawn() -> None:
    record, first = MemoryRecord(), founding(3, 1)
    assert not first.founds()
    assert asked(founding(3, 0, record=record), 1, attempt=1)
    again = founding(3, 0, record=record)  # it was away, and is the one to found now
    assert not again.candidate(LOST_AFTER_S)
    first.is_fresh(0, LOST_AFTER_S)
    first.withdraw(LOST_AFTER_S)
    again.learned(first._record.past)
    assert again.candidate(2 * LOST_AFTER_S)


def test_hosts_of_a_group_that_is_over_may_have_leases_for_a_while() -> None:
    past = Past(generation=1)  # its last voter is out; another host may be cut off
    assert not founding(1, 0, record=MemoryRecord(past)).candidate(LOST_AFTER_S - 0.01)
    part = founding(1, 0, record=MemoryRecord(Past((group("h1", "h2", "h3"),))))
    assert not part.candidate(100.0)
    part.learned(Past(out=frozenset(["h1", "h2"])))
    assert not part.candidate(100.0 + LOST_AFTER_S - 0.01)
    assert part.candidate(100.0 + LOST_AFTER_S)


def test_late_grants_to_a_withdrawn_attempt_do_not_count() -> None:
    part = founding(3, 1)
    assert not part.founds()
    part.is_fresh(0, now=SILENCE_S)
    part.withdraw(SILENCE_S)
    assert part.attempt == 2
    part.granted(2, attempt=1)
    assert part.holder() is None
    assert not part.founds()


def test_who_was_in_a_group_founds_and_grants_only_when_it_is_over() -> None:
    was = group("h0", "h1", "h2", "h3", "h4")
    part = founding(3, 1, record=MemoryRecord(Past((was,), frozenset(["h1", "h2"]))))
    assert not part.candidate(100.0)  # h0, h3 and h4 may act
    assert not asked(part, 2, attempt=1)
    part.learned(Past(out=frozenset(["h9"])))
    assert not part.candidate(100.0)
    assert asked(part, 2, 1, Past(out=frozenset(["h0"])))  # the candidate knows better


def test_a_later_configuration_is_learned_from_those_that_are_out() -> None:
    was = group("h0", "h1", "h2")
    later = group("h2", "h3", "h4", index=5)
    known = Past((was,), frozenset(["h0"])).merged(Past((later,), frozenset(["h1"])))
    assert known.groups == (was.merged(later),)  # h2, h3 and h4 decide by now
    assert known.merged(Past(out=frozenset(["h3", "h4"]))).groups == ()


def test_while_voters_change_both_halves_must_be_over() -> None:
    old, new = Configuration(frozenset(["a", "b", "c"])), Configuration(frozenset(["c", "d", "e"]))
    joint = Group("g", 1, Config(1, Voters(old)), (Config(4, Voters(new, old)),))
    assert not joint.is_over(frozenset(["a", "b"]))  # the new half may decide alone
    assert not joint.is_over(frozenset(["d", "e"]))  # perhaps nobody has the change
    assert joint.is_over(frozenset(["a", "b", "d", "e"]))

"""The decisions for a job on many hosts, without hosts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from outlast.coordination.job_record import JobState
from outlast.coordination.records import SizeRecord
from outlast.coordination.replicated.hosts import HostInfo, HostJoined, HostLost
from outlast.launch.agent.decisions import JobRecord
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.hosts.host_entries import Links, Probe
from outlast.launch.hosts.job.decider import Decider, Facts, Wait
from outlast.launch.hosts.job.leading import WaitNotice
from outlast.launch.hosts.plan import (
    End,
    Entry,
    Finish,
    GiveUp,
    JobPlan,
    LostHost,
    Restart,
    Stage,
    Start,
    Stop,
    Take,
    decode,
)

WRAPPED = Facts(job=JobRecord(JobState.RUNNING))
LIMITS = HostsSpec(minimum=2, maximum=3, backend="c10d", endpoints=())


def info(name: str) -> HostInfo:
    return HostInfo(id=name, name=name, address=f"10.0.0.{ord(name) - 96}", store_port=1)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts of a job, and the one that leads."""

    hosts: tuple[HostInfo, ...]
    lost: str = ""
    leader: str = ""

    def of(self, plan: JobPlan) -> JobPlan:
        """The plan with these hosts."""
        lost = {h: LostHost(host=info(h), reason="its lease is over") for h in self.lost}
        return dataclasses.replace(plan, hosts={h.id: h for h in self.hosts}, lost=lost)


class Rules:
    """A `Decider`, asked about the plan of some hosts."""

    def __init__(self, limits: HostsSpec, nproc: int, max_restarts: int) -> None:
        self._decider = Decider(limits, nproc, max_restarts)

    def next_entry(self, plan: JobPlan, there: Hosts, facts: Facts, now: float) -> Entry | None:
        facts = dataclasses.replace(facts, leader=there.leader)
        found = self._decider.decide(there.of(plan), facts, now)
        return None if isinstance(found, Wait) else found

    def wait(self, plan: JobPlan, there: Hosts, facts: Facts, now: float) -> Wait | None:
        found = self._decider.decide(there.of(plan), facts, now)
        return found if isinstance(found, Wait) else None


def group(there: str, lost: str = "") -> Hosts:
    return Hosts(tuple(map(info, there)), lost)


def running(places: str, *more: Entry) -> JobPlan:
    plan = JobPlan()
    for entry in (Start(0, tuple(places)), *more):
        plan = plan.apply(entry)
    return plan


def first(
    plan: JobPlan, there: Hosts, facts: Facts = WRAPPED, limits: HostsSpec = LIMITS
) -> Entry | None:
    return Rules(limits, 1, 1).next_entry(plan, there, facts, 0.0)


def test_the_first_attempt_starts_when_all_came_or_the_last_call_is_over() -> None:
    assert first(JobPlan(), group("abc")) == Start(0, ("a", "b", "c"))
    assert first(JobPlan(), group("abcd")) == Start(0, ("a", "b", "c"))
    decider = Rules(LIMITS, 1, 1)
    assert decider.next_entry(JobPlan(), group("ab"), Facts(), 100.0) is None
    assert decider.next_entry(JobPlan(), group("ab"), Facts(), 129.9) is None
    assert decider.next_entry(JobPlan(), group("a"), Facts(), 129.9) is None  # b is gone again
    assert decider.next_entry(JobPlan(), group("ac"), Facts(), 130.0) is None
    assert decider.next_entry(JobPlan(), group("ac"), Facts(), 160.0) == Start(0, ("a", "c"))


def test_too_few_hosts_end_the_job_in_the_end_and_say_who_came() -> None:
    decider = Rules(LIMITS, 1, 1)
    assert decider.next_entry(JobPlan(), group("a"), Facts(), 5.0) is None
    ended = decider.next_entry(JobPlan(), group("a"), Facts(), 605.0)
    assert ended == End("waited 10 min 0 s for 2 hosts (--nnodes): only 1 joined: a (10.0.0.1)")
    plan = JobPlan().apply(ended)
    assert first(plan, group("a"), Facts()) == Finish()  # no host had a worker


def test_a_spare_takes_the_place_of_a_lost_host_in_a_wrapped_job() -> None:
    plan = running("abc")
    assert first(plan, group("abc")) is None
    assert first(plan, group("abcd")) is None
    assert first(plan, group("acd", lost="b")) == Take(1, "d")
    after = plan.apply(Take(1, "d"))
    assert (after.places, after.taken_over) == (("a", "d", "c"), (0, 1, 0))
    assert first(after, group("acd", lost="b")) is None


def at(name: str, *topology: str) -> HostInfo:
    return structs.replace(info(name), topology=topology)


def test_a_spare_takes_the_place_of_the_nearest_lost_host() -> None:
    lost = {
        host.id: LostHost(host=host, reason="its lease is over")
        for host in (at("b", "s1", "1"), at("c", "s2", "2"))
    }
    plan = dataclasses.replace(running("abc"), lost=lost)

    def taken(*spares: HostInfo) -> Entry | Wait | None:
        hosts = {host.id: host for host in (at("a", "s1", "0"), *spares)}
        limits = dataclasses.replace(LIMITS, minimum=1)
        return Decider(limits, 1, 1).decide(dataclasses.replace(plan, hosts=hosts), WRAPPED, 0.0)

    # The host that comes back, a host at the same switch, and one that is near none.
    assert taken(at("d", "s2", "2")) == Take(2, "d")
    assert taken(at("d", "s3", "0"), at("e", "s2", "9")) == Take(2, "e")
    assert taken(at("d", "s2", "9"), at("e", "s2", "2")) == Take(2, "e")
    assert taken(at("d", "s3", "9")) == Take(1, "d")
    assert taken(info("d"), info("e")) == Take(1, "d")  # nothing is known of the spares
    # No place is lost: the first in the order of the network gets the new one.
    grown = dataclasses.replace(running("a"), hosts={h: at(h, *"s1") for h in "a"})
    for late in (at("d", "s10"), at("e", "s9")):
        grown = dataclasses.replace(grown, hosts={**grown.hosts, late.id: late})
    assert Decider(LIMITS, 1, 1).decide(grown, WRAPPED, 0.0) == Take(1, "e")


def test_a_host_takes_the_place_that_it_asks_for() -> None:
    limits = dataclasses.replace(LIMITS, minimum=3, place=0)
    there = group("ac", lost="b")
    for place, entry in ((0, None), (1, Take(1, "d"))):
        spare = structs.replace(info("d"), place=place)
        joined = dataclasses.replace(there, hosts=(*there.hosts, spare))
        assert first(running("abc"), joined, limits=limits) == entry


def test_a_late_host_gets_a_place_of_its_own() -> None:
    plan = running("ab")
    assert first(plan, group("abc")) == Take(2, "c")
    assert plan.apply(Take(2, "c")).taken_over == (0, 0, 1)
    plain = first(plan, group("abc"), Facts())
    assert plain == Restart(0, "host c (10.0.0.3) has joined: all workers restart", counts=False)


def test_places_are_given_up_when_no_host_comes() -> None:
    decider, plan = Rules(LIMITS, 1, 1), running("abc")
    assert decider.next_entry(plan, group("ac", lost="b"), WRAPPED, 0.0) is None
    assert decider.next_entry(plan, group("ac", lost="b"), WRAPPED, 599.0) is None
    assert decider.next_entry(plan, group("ac", lost="b"), WRAPPED, 600.0) == GiveUp((1,))
    after = plan.apply(GiveUp((1,)))
    assert decider.next_entry(after, group("ac", lost="b"), WRAPPED, 900.0) is None
    assert decider.next_entry(after, group("acd", lost="b"), WRAPPED, 900.0) == Take(1, "d")
    assert decider.next_entry(after, group("a", lost="bc"), WRAPPED, 1300.0) is None  # c is new
    ended = decider.next_entry(after, group("a", lost="bc"), WRAPPED, 1900.0)
    assert isinstance(ended, End)
    assert "host c (10.0.0.3) was lost: its lease is over; no other host" in ended.cause
    assert ended.cause.endswith("--nnodes needs 2: 1 left")


def needs(ranks: int, least: int, wait_s: float = 0.0) -> Facts:
    return dataclasses.replace(WRAPPED, size=SizeRecord(ranks, least, wait_s))


@pytest.mark.parametrize(
    ("facts", "limit_s", "then"),
    [
        (needs(2, 1), 1.0, "the job continues on 2"),
        (needs(2, 0, 30.0), 30.0, "the job continues on 2"),  # AwaitReplacements
        (needs(2, 3), 600.0, "the job ends, as the program needs 3 ranks (min_ranks)"),
        (needs(1, 2), 600.0, "the job ends, as the program needs 2 ranks (min_ranks)"),
        (needs(3, 3), 600.0, "the job ends, as the program needs 3 ranks (min_ranks)"),  # old news
        (
            needs(2, -1),
            600.0,
            "the job continues on 2, if the program allows it, which is not known yet",
        ),
    ],
)
def test_a_job_that_may_go_on_smaller_does_so_soon(facts: Facts, limit_s: float, then: str) -> None:
    decider, plan, there = Rules(LIMITS, 1, 1), running("abc"), group("ac", lost="b")
    assert decider.next_entry(plan, there, facts, 10.0) is None
    wait = decider.wait(plan, there, facts, 10.25)
    assert wait is not None
    assert (wait.what, wait.until, wait.then) == ("a host for rank 1", 10.0 + limit_s, then)
    assert decider.next_entry(plan, there, facts, 9.9 + limit_s) is None
    given_up = decider.next_entry(plan, there, facts, 10.0 + limit_s)
    assert given_up == GiveUp((1,))
    assert decider.wait(plan.apply(given_up), there, facts, 11.0) is None


def test_ranks_for_which_no_restart_is_held_are_not_said_to_be_waited_for() -> None:
    decider, plan, there = Rules(LIMITS, 1, 1), running("abc"), group("ac", lost="b")
    assert decider.next_entry(plan, there, WRAPPED, 0.0) is None
    assert decider.wait(plan, there, WRAPPED, 20.0) is None


def test_below_the_minimum_of_hosts_the_job_waits_and_says_so() -> None:
    decider, plan, there = Rules(LIMITS, 1, 1), running("abc"), group("a", lost="bc")
    assert decider.next_entry(plan, there, needs(1, 1), 0.0) is None
    wait = decider.wait(plan, there, needs(1, 1), 0.0)
    assert wait is not None
    assert (wait.what, wait.until) == ("a host for rank 1, rank 2", 600.0)
    assert wait.then == "the job ends, as --nnodes needs 2 hosts and 1 left"


def test_the_option_for_replacements_wins() -> None:
    limits = dataclasses.replace(LIMITS, replacement_s=40.0)
    plan, there = running("abc"), group("ac", lost="b")
    for facts in (needs(2, 1), needs(2, 3), WRAPPED):
        decider = Rules(limits, 1, 1)
        assert decider.next_entry(plan, there, facts, 0.0) is None
        assert decider.next_entry(plan, there, facts, 39.0) is None
        assert decider.next_entry(plan, there, facts, 40.0) == GiveUp((1,))


def test_what_the_start_and_the_end_of_workers_wait_for() -> None:
    decider = Rules(LIMITS, 1, 1)
    for there, text in (
        ("a", "2 hosts (--nnodes), 1 joined: a"),
        ("ab", "1 more host (--nnodes), 2 joined: a, b"),
    ):
        assert decider.next_entry(JobPlan(), group(there), Facts(), 0.0) is None
        wait = decider.wait(JobPlan(), group(there), Facts(), 2.0)
        assert wait is not None
        assert wait.what == text
        assert wait.until == (600.0 if there == "a" else 30.0)
    clearing = running("abc", Restart(0, "why"))
    some = Facts(cleared=frozenset("a"), done=frozenset("b"))
    wait = decider.wait(clearing, group("abc"), some, 0.0)
    assert wait is not None
    assert wait.what == "the workers of c to end"
    ending = decider.wait(running("abc", Stop(15, "a")), group("abc"), some, 0.0)
    assert ending is not None
    assert ending.what == "the workers of a, c to end"


def test_a_wait_is_told_when_it_lasts_and_when_it_is_over() -> None:
    said: list[str] = []
    notice = WaitNotice(said.append)
    short = Wait("the workers of c to end")
    notice.waiting(short, 0.0)
    notice.waiting(short, 4.0)
    notice.waiting(None, 4.5)
    assert said == []
    notice.waiting(Wait("a host for rank 1", 30.0, "the job continues on 2", at_once=True), 10.0)
    notice.waiting(Wait("a host for rank 1", 30.0, "the job continues on 2", at_once=True), 11.0)
    notice.waiting(None, 30.0)
    notice.waiting(short, 40.0)
    notice.waiting(short, 45.0)
    notice.waiting(None, 47.0)
    assert said == [
        "waiting for a host for rank 1; in 20.00 s the job continues on 2",
        "the wait is over, after 20.00 s",
        "waiting for the workers of c to end",
        "the wait is over, after 7.00 s",
    ]


def test_the_loss_of_a_host_in_words() -> None:
    lost = LostHost(host=info("b"), reason="no heartbeat for 6.1 s")
    assert str(lost) == "host b (10.0.0.2) was lost: no heartbeat for 6.1 s"
    left = LostHost(host=info("b"), reason="it has left the group", left=True)
    assert str(left) == "host b (10.0.0.2) has left the group"
    link = dataclasses.replace(left, reason="its link to c is broken")
    assert str(link) == "host b (10.0.0.2) left: its link to c is broken"


def test_a_plain_job_restarts_if_it_may() -> None:
    plan = running("abc")
    restart = first(plan, group("ac", lost="b"), Facts())
    assert isinstance(restart, Restart)
    assert restart.cause == "host b (10.0.0.2) was lost: its lease is over: restart 1 of 1"
    plan = plan.apply(restart)
    assert plan.stage is Stage.CLEARING
    assert first(plan, group("ac", lost="b"), Facts(cleared=frozenset("a"))) is None
    cleared = Facts(cleared=frozenset("ac"))
    decider = Rules(LIMITS, 1, 1)
    assert decider.next_entry(plan, group("ac", lost="b"), cleared, 0.0) is None  # the last call
    started = decider.next_entry(plan, group("ac", lost="b"), cleared, 1.0)
    assert started == Start(1, ("a", "c"), used=1)
    plan = plan.apply(started)
    ended = first(plan, group("a", lost="bc"), Facts())
    assert isinstance(ended, End)
    assert ended.cause.endswith("and no restart is left (--max-restarts 1)")


def test_a_job_that_is_over_is_not_repaired() -> None:
    for job in (
        JobRecord(JobState.COMPLETED),
        JobRecord(JobState.ABORTED),
        JobRecord(JobState.RUNNING, stopping=True),
    ):
        assert first(running("abc"), group("acd", lost="b"), Facts(job=job)) is None


def test_the_end_waits_for_all_hosts_that_are_there() -> None:
    plan = running("abc")
    ab = dataclasses.replace(WRAPPED, done=frozenset("ab"))
    assert first(plan, group("abcd"), ab) is None
    assert first(plan, group("abd", lost="c"), ab) == Finish()  # nothing runs any more
    stopped = plan.apply(Stop(15, "a"))
    assert first(stopped, group("abcd"), ab) is None
    assert first(stopped, group("abd", lost="c"), ab) == Finish()


def test_a_decision_that_comes_too_late_changes_nothing() -> None:
    again = running("ab", Restart(0, "why"), Start(1, ("a", "b"), used=1))
    late = again.apply(Restart(0, "of another host, for the attempt before"))
    assert late == dataclasses.replace(again, number=late.number)
    stopped = again.apply(Stop(15, "a"))
    for entry in (End("why"), Stop(2, "b"), Start(2, ("a",)), Take(1, "c"), Restart(1, "why")):
        after = stopped.apply(entry)
        assert after == dataclasses.replace(stopped, number=after.number)


ENTRIES = st.one_of(
    st.builds(
        Start,
        st.integers(0, 2),
        st.lists(st.sampled_from("abcd"), min_size=1, unique=True).map(tuple),
    ),
    st.builds(Take, st.integers(0, 3), st.sampled_from("abcd")),
    st.builds(GiveUp, st.lists(st.integers(0, 3)).map(tuple)),
    st.builds(Restart, st.integers(0, 2), st.just("why")),
    st.just(Stop(15, "a")),
    st.just(End("why")),
    st.just(Finish()),
    st.builds(HostLost, st.sampled_from("abcd"), st.just("why")),
)


@given(st.lists(ENTRIES))
def test_any_chain_leads_to_a_plan_that_makes_sense(entries: list[Entry]) -> None:
    plan = JobPlan()
    chain: list[Entry] = [HostJoined(info(name)) for name in "abcd"]
    for entry in entries:  # no host is lost twice
        if entry not in chain or not isinstance(entry, HostLost):
            chain.append(entry)
    for number, entry in enumerate(chain, start=1):
        assert decode(entry.encode()) == entry
        before, plan = plan, plan.apply(entry)
        assert plan.number == number
        assert len(set(plan.places)) == len(plan.places) == len(plan.taken_over)
        if before.stage in (Stage.ENDING, Stage.FINISHED):  # nothing is started any more
            assert plan.places == before.places
            assert plan.stage in (Stage.ENDING, Stage.FINISHED)


def suspected(plan: JobPlan, there: Hosts, **reports: str) -> tuple[JobPlan, Entry | None]:
    """The plan after a probe of the links, and what follows from the reports."""
    probe = first(plan, there, dataclasses.replace(WRAPPED, suspicion="links/0"))
    assert isinstance(probe, Probe)
    plan = plan.apply(decode(probe.encode()))
    links = {host: frozenset(missed) for host, missed in reports.items()}
    facts = dataclasses.replace(WRAPPED, suspicion="links/0", links=links)
    return plan, first(plan, there, facts)


def led(there: str, leader: str, lost: str = "") -> Hosts:
    return dataclasses.replace(group(there, lost), leader=leader)


def test_links_are_probed_once_for_each_suspicion_and_judged_when_all_have_reported() -> None:
    there = led("abc", "a")
    plan, found = suspected(running("abc"), there, a="", b="c")
    assert found is None  # c has not reported
    plan, found = suspected(running("abc"), there, a="", b="", c="")
    assert found == Links(0, "links/0")
    plan = plan.apply(found)
    assert plan.probe is None
    assert first(plan, there, dataclasses.replace(WRAPPED, suspicion="links/0")) is None
    assert first(plan, there, dataclasses.replace(WRAPPED, suspicion="links/1")) == Probe(
        0, "links/1", ("a", "b", "c")
    )
    # A host that was lost meanwhile does not report, and its links are those of no host.
    _, found = suspected(running("abc"), led("ab", "a", lost="c"), a="c", b="c")
    assert found == Links(0, "links/0")


def test_of_the_ends_of_a_broken_link_the_one_that_neither_leads_nor_is_first_leaves() -> None:
    for leader, reports, leaves in (
        ("a", {"a": "", "b": "c", "c": "b"}, "c"),
        ("a", {"a": "", "b": "c", "c": ""}, "c"),  # seen from one end only
        ("c", {"a": "", "b": "c", "c": "b"}, "b"),
        ("b", {"a": "bc", "b": "a", "c": "a"}, "a"),  # the network of one host is at fault
    ):
        _, found = suspected(running("abc"), led("abc", leader), **reports)
        assert isinstance(found, Links)
        assert set(found.excluded) == {leaves}
        assert found == decode(found.encode())
    assert found.waits_for == {"a": ["b", "c"]}
    assert "host a (10.0.0.1) and host b (10.0.0.2), c (10.0.0.3) do not" in found.excluded["a"]


def test_a_spare_whose_link_is_broken_leaves_and_another_takes_the_place_of_one_that_left() -> None:
    there = led("abcde", "a")
    plan, found = suspected(running("abc"), there, a="", b="d", c="", d="b", e="")
    assert isinstance(found, Links)
    assert set(found.excluded) == {"d"}
    plan = plan.apply(found)
    assert first(plan, led("acde", "a", lost="b")) == Take(1, "e")  # d is about to leave


def test_a_host_that_left_because_of_a_link_is_named_with_it_when_the_job_ends() -> None:
    plan, found = suspected(running("abc"), led("abc", "a"), a="", b="c", c="b")
    assert isinstance(found, Links)
    plan = plan.apply(found)
    decider = Rules(dataclasses.replace(LIMITS, minimum=3), 1, 1)
    there = led("ab", "a", lost="c")
    assert decider.next_entry(plan, there, WRAPPED, 0.0) is None
    ended = decider.next_entry(plan, there, WRAPPED, 600.0)
    assert isinstance(ended, End)
    assert "do not reach each other" in ended.cause

"""`--max-host-faults`: a host whose ranks fail too often gets no more ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from launch.hosts.agents import Hosts, address
from launch.hosts.test_decider import Rules, group, info, running
from launch.runs import WORKER
from outlast.coordination.blame import may_be_of_host
from outlast.coordination.deciding import decision_key
from outlast.coordination.decision import Decision, ViewRecord, encode_record
from outlast.coordination.job_record import JobState
from outlast.coordination.replicated.hosts import HostJoined, HostLost
from outlast.coordination.stores.store import MemoryStore
from outlast.events.fault_record import FaultRecord
from outlast.launch.agent.decisions import JobRecord
from outlast.launch.agent.job_keys import JobKeys
from outlast.launch.config.from_options import job_from_options
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.config.options import RunOptions
from outlast.launch.hosts.host_entries import Blame, Unfit
from outlast.launch.hosts.job.decider import Facts
from outlast.launch.hosts.job.fault_limit import FaultLimit
from outlast.launch.hosts.plan import JobPlan, Restart, Start

CALL = JobRecord(JobState.RUNNING, prefix="call/0/")
LIMITS = HostsSpec(minimum=1, maximum=3, backend="c10d", endpoints=(), max_faults=2)


class Leader:
    """The limit as the leader's agent applies it, to the decisions of ranks in a store."""

    def __init__(self, window_s: float = float("inf")) -> None:
        self.store = MemoryStore()
        limits = dataclasses.replace(LIMITS, fault_window_s=window_s)
        self.limit = FaultLimit(limits, JobKeys(self.store))
        self.now = 0.0
        for rank, host in enumerate("abc"):
            self.store.put(f"{CALL.prefix}claim/{rank}", f"{host}/token".encode())
        self.decide(0)

    def decide(self, iteration: int, rank: int = -1, **fault: Any) -> None:
        """The decision with which an iteration starts, after a fault of a rank."""
        made = Decision(ViewRecord(iteration, (0, 1, 2)))
        if rank >= 0:
            where = {"iteration": iteration - 1, "member": rank, "rank": rank, "pid": 1}
            how = {"host": "", "interruption": "EXCEPTION", "cause": "OSError: x", **fault}
            made = dataclasses.replace(made, last_cause=FaultRecord(**where, **how))
        key = CALL.prefix + decision_key(iteration, 0)
        self.store.put(key, encode_record(made))

    def look(self, plan: JobPlan) -> JobPlan:
        """Looks, and has its entries applied."""
        self.limit.note(plan, self.now)
        while (entry := self.limit.next_entry(plan, CALL, self.now)) is not None:
            plan = plan.apply(entry)
            self.limit.note(plan, self.now)
        return plan


def three() -> JobPlan:
    plan = running("abc")
    for name in "abc":
        plan = plan.apply(HostJoined(info(name)))
    return plan


def test_each_fault_counts_once_and_the_second_one_is_too_many() -> None:
    leader = Leader()
    leader.decide(1, rank=1)
    plan = leader.look(three())
    assert plan.blames == (Blame("b", "0/call/0/0", "OSError: x (rank 1)"),)
    assert leader.look(plan) == plan
    leader.decide(2, rank=0)
    plan = leader.look(plan)
    assert not plan.unfit
    leader.decide(3, rank=1, interruption="SOFT_TIMEOUT", cause="no progress")
    plan = leader.look(plan)
    assert plan.unfit == {
        "b": "host b (10.0.0.2) gets no more ranks: its ranks were the first cause of 2 restarts "
        "(--max-host-faults), the last time by no progress (rank 1)"
    }
    assert leader.look(plan) == plan


def test_the_next_leader_knows_the_faults_from_the_chain() -> None:
    first, second = Leader(), Leader()
    first.decide(1, rank=1)
    plan = three()
    second.look(plan)
    plan = first.look(plan)
    for iteration in (1, 2):
        second.decide(iteration, rank=1)
    assert [each.restart for each in second.look(plan).blames] == ["0/call/0/0", "0/call/0/1"]


@pytest.mark.parametrize(
    "fault",
    [
        {"mistake": True},
        {"consequence": True},
        {"overtaken": True},
        {"cause": "outlast.errors.SkipBatches: after step 5, the loss is NaN"},
        {"cause": "ReplicasDiffer: after step 5"},
    ],
)
def test_faults_that_say_nothing_of_the_host_do_not_count(fault: dict[str, Any]) -> None:
    leader = Leader()
    leader.decide(1, rank=1, **fault)
    assert not leader.look(three()).blames


def test_only_the_faults_of_the_window_count() -> None:
    leader = Leader(window_s=60.0)
    plan = three()
    for iteration, now in ((1, 0.0), (2, 61.0), (3, 121.0)):
        leader.now = now
        leader.decide(iteration, rank=1)
        plan = leader.look(plan)
        assert bool(plan.unfit) is (iteration == 3)


def test_a_host_that_joins_late_does_not_know_when_the_faults_before_were() -> None:
    plan = three()
    for number in range(2):
        plan = plan.apply(Blame("b", str(number), "x"))
    assert not Leader(window_s=60.0).look(plan).unfit
    assert Leader().look(plan).unfit


def test_a_machine_that_comes_back_is_told_to_leave_again() -> None:
    plan = three()
    for number in range(2):
        plan = plan.apply(Blame("b", str(number), "x"))
    plan = plan.apply(Unfit("b", "x")).apply(HostLost("b", "it has left", left=True))
    plan = plan.apply(HostJoined(structs.replace(info("b"), id="b2")))
    assert "b2" in Leader().look(plan).unfit


def test_a_restart_of_all_workers_counts_and_the_host_gets_no_place_in_the_next() -> None:
    plan = three().apply(Restart(0, "rank 1 failed", process="b:17"))
    plan = plan.apply(Start(1, ("a", "b", "c"))).apply(Restart(1, "rank 1 failed", process="b:18"))
    plan = Leader().look(plan)
    assert [(each.host, each.restart) for each in plan.blames] == [("b", "0"), ("b", "1")]
    assert list(plan.unfit) == ["b"]
    facts = Facts(cleared=frozenset("abc"))
    rules = Rules(dataclasses.replace(LIMITS, replacement_s=0.001), 1, 9)
    assert rules.next_entry(plan, group("abc"), facts, 0.0) is None
    assert rules.next_entry(plan, group("abc"), facts, 1.0) == Start(2, ("a", "c"), 1)


def test_a_restart_of_all_workers_by_a_mistake_does_not_count() -> None:
    plan = three().apply(Restart(0, "rank 1 failed", process="b:17", blames=False))
    assert not Leader().look(plan).blames


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        ("KeyError: 'x'", False),
        ("torch.distributed.DistBackendError: Connection closed by peer [::1]:1", False),
        ("RuntimeError: [gloo] Connection reset by peer", False),
        ("outlast.errors.NonFinite: the loss", False),
        ("RuntimeError: CUDA error: uncorrectable ECC error", True),
        ("OSError: [Errno 5] Input/output error", True),
        ("outlast.errors.CheckpointError: the disk", True),
        ("no exception", True),
    ],
)
def test_which_exceptions_count_for_the_host(error: str, counts: bool) -> None:
    assert may_be_of_host(error) is counts


@pytest.mark.parametrize("text", ["0", "x", "2/0", "2/nan", "2/x", "-1/5"])
def test_the_option_is_checked(text: str) -> None:
    options = {"nnodes": "2", "rdzv_endpoint": "a:1", "max_host_faults": text}
    with pytest.raises(ValueError, match=f"--max-host-faults {text}: must be a number of faults"):
        job_from_options(RunOptions(script=__file__, **options))


def test_the_option_needs_another_host() -> None:
    with pytest.raises(ValueError, match="--max-host-faults: with --nnodes 1 no other host"):
        job_from_options(RunOptions(script=__file__, max_host_faults="3/60"))


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_host_with_too_many_faults(tmp_path: Path) -> None:
    options = ("--nnodes=2", "--max-restarts=3", "--max-host-faults=1")
    with Hosts(tmp_path, WORKER, *options) as hosts:
        one, two = hosts.start_all(2)
        one.ready(0)
        failed = two.ready(1)
        spare = hosts.start(4)
        spare.until_said("this one is a spare")
        failed.fail()
        assert two.wait() == 69
        why = f"({address(3)}) gets no more ranks: its ranks were the first cause of a restart"
        assert why in two.err
        assert f"rank 1 (pid {failed.pid}" in two.err
        last = one.ready(0), spare.ready(1)
        one.until_said(why)
        again = hosts.start(3)
        assert again.wait() == 69
        assert why in again.err
        for worker in last:
            worker.succeed()
        assert [one.wait(), spare.wait()] == [0, 0]

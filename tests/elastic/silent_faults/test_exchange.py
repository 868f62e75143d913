"""The exchange of the checks' records, on one rank: without a store, and begun again."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic.silent_faults.exchange import Exchange
from outlast.elastic.silent_faults.job_checks import JobChecks
from outlast.elastic.silent_faults.replica_check import ReplicaCheck, RunningReplicaCheck
from outlast.errors import ReplicasDiffer, StoreError
from outlast.events.emitter import Emitter, MemorySink

NET_S = 60.0


class LostStore(MemoryStore):
    """A store that does not answer any more."""

    def put(self, key: str, value: bytes) -> None:
        raise StoreError("the store is lost")


def test_work_that_training_waits_for_is_done_after_the_loss_of_the_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = CallLedger(LostStore(), "test", 1, 2)
    exchange = Exchange(ledger, "replicas", lambda records: "", str, str)
    hashed = threading.Event()
    try:
        exchange.publish(lambda: "a record")
        exchange.run(hashed.set)
        assert hashed.wait(NET_S)
        assert isinstance(exchange.error, StoreError)
        assert exchange.all_results(NET_S) == []
    finally:
        exchange.close()
    assert "replicas: no longer checked: the store is lost" in caplog.text


def test_a_restore_does_not_go_on_with_what_the_loss_of_the_store_left_unchecked() -> None:
    """The abort after another rank's `ReplicasDiffer` ends this rank's connections before this
    rank has read the result, and before it is interrupted.
    """
    ledger = CallLedger(LostStore(), "test", 1, 2)
    with RunningReplicaCheck(ReplicaCheck(), nn.Linear(1, 1), ledger, Emitter(None), 7) as check:
        with pytest.raises(StoreError, match="the store is lost"):
            check.compare_now(NET_S, required=True)
        check.compare_now(NET_S)  # at the end of a job, another rank may have taken it along


def test_checks_do_not_read_records_from_before_an_earlier_restore_of_the_same_step() -> None:
    store, checks = MemoryStore(), JobChecks([ReplicaCheck()])
    checkpointer: Any = SimpleNamespace(emitter=Emitter(None))
    unused: Any = None
    try:
        for _ in range(3):
            ledger = CallLedger(store, "job", 0, 1)
            checks.start(nn.Linear(1, 1), checkpointer, ledger, 4, unused)
    finally:
        checks.close()
    assert len({key.rpartition("/")[0] for key in store.table}) == 3


def test_a_difference_is_reported_before_any_rank_acts_on_it() -> None:
    """Rank 1 raises, and the restart may interrupt rank 0 before its next step."""
    store, events = MemoryStore(), MemorySink()
    checks = []
    for rank in range(2):
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, float(rank))
        ledger, emitter = CallLedger(store, "job", rank, 2), Emitter(events)
        emitter.place.rank = rank
        options = ReplicaCheck(every=1, on_mismatch="exclude")
        checks.append(RunningReplicaCheck(options, model, ledger, emitter, 0))
    try:
        for check in reversed(checks):  # rank 0 last: it finds the records of both
            check.step(1)
            check._settle()
            check._publish_if_complete()  # as the next step does, without acting on results
            published = threading.Event()
            check._exchange.run(published.set)
            assert published.wait(NET_S)
        (result,) = checks[1]._exchange.all_results(NET_S)
        with pytest.raises(ReplicasDiffer, match="after step 1: rank 0 on"):
            checks[1]._act_on(result)
        assert [(event.kind, event.rank) for event in events.events] == [("replica_mismatch", 0)]
    finally:
        for check in checks:
            check.close()

"""The exchange of the checks' records, on one rank: without a store, and begun again."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from outlast.coordination import MemoryStore
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.silent_faults.exchange import Exchange
from outlast.elastic.silent_faults.job_checks import JobChecks
from outlast.elastic.silent_faults.replica_check import ReplicaCheck
from outlast.errors import StoreError
from outlast.events import Emitter

NET_S = 60.0


class LostStore(MemoryStore):
    """A store that does not answer any more."""

    def put(self, key: str, value: bytes) -> None:
        raise StoreError("the store is lost")


def test_work_that_training_waits_for_is_done_after_the_loss_of_the_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = Exchange(CallLedger(LostStore(), "test", 1, 2), "replicas", lambda texts: "")
    hashed = threading.Event()
    try:
        exchange.publish(lambda: "a record")
        exchange.run(hashed.set)
        assert hashed.wait(NET_S)
        assert exchange.lost
        assert exchange.all_results(NET_S) == []
    finally:
        exchange.close()
    assert "replicas: no longer checked: the store is lost" in caplog.text


def test_checks_do_not_read_records_from_before_an_earlier_restore_of_the_same_step() -> None:
    store, checks = MemoryStore(), JobChecks([ReplicaCheck()])
    checkpointer: Any = SimpleNamespace(emitter=Emitter(None))
    try:
        for _ in range(3):
            checks.start(nn.Linear(1, 1), checkpointer, CallLedger(store, "job", 0, 1), step=4)
    finally:
        checks.close()
    assert len({key.rpartition("/")[0] for key in store.table}) == 3

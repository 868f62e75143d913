"""The contexts of a process whose device is not the first: `python contexts.py SCENARIO FOLDER`.

A new thread has device 0, and what torch does on another device goes back to the current one: with
CUDA, that opens a context there, of half a gigabyte, beside those of the rank whose device it is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from late import device, scenario
from late.scenario import until
from outlast.async_checkpoint import Checkpointer
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic import ReplicaCheck, StragglerCheck
from outlast.elastic.job.live.queued import Queued
from outlast.elastic.silent_faults.exchange import Running
from outlast.elastic.silent_faults.replica_check import RunningReplicaCheck
from outlast.elastic.silent_faults.straggler_check import RunningStragglerCheck
from outlast.events.emitter import Emitter

LATE = device.use()
PATH = sys.argv[2]


def model(index: int = 1) -> nn.Linear:
    torch.accelerator.set_device_index(index)
    return nn.Linear(64, 8).to("late")


def end(*checks: Running) -> None:
    for check in checks:
        check.close()
    assert re.fullmatch(r"1 by \d+ \S+", LATE.contexts()), LATE.contexts()


def a_save_during_training() -> None:
    made = model()
    optimizer = torch.optim.Adam(made.parameters(), fused=True)
    with Checkpointer(PATH, overlap=optimizer) as checkpointer:
        for step in (1, 2):
            made(torch.ones(2, 64).to("late")).sum().backward()
            checkpointer.save(step, {"m": made.state_dict(), "o": optimizer.state_dict()})
            optimizer.step()
        checkpointer.wait()
    end()


def a_drain_after_a_fault() -> None:
    Queued(model().parameters(), lambda: None).drain()
    end()


def replicas_are_compared() -> None:
    made, store = model(), MemoryStore()
    options = ReplicaCheck(every=1)
    checks = [
        RunningReplicaCheck(options, made, CallLedger(store, "r", rank, 2), Emitter(None), 0)
        for rank in range(2)
    ]
    with torch.no_grad():
        for each in made.parameters():
            each.add_(1)

    def known() -> bool:
        for check in checks:
            check.step()
        return all(check.known_clean_step for check in checks)

    until(known)
    end(*checks)


def stragglers_are_looked_for() -> None:
    made, store, options = model(), MemoryStore(), StragglerCheck(window=6)
    checks = [
        RunningStragglerCheck(options, made, CallLedger(store, "s", rank, 2), Emitter(None), 0)
        for rank in range(2)
    ]
    for step in range(1, 7):
        made(torch.ones(2, 64).to("late")).sum().backward()
        for check in checks:
            check.step(step)
    for check in checks:
        check._exchange.all_results(30)
        assert check._exchange.error is None
    end(*checks)


scenario.run(globals())

"""Phases of an injector: what is due in which phase, and in which thread it fires."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from chaos.in_memory import Call, MemoryFired
from outlast.chaos import Kind, Phase, PlannedFault, fail_at
from outlast.chaos.injector import Injector
from outlast.errors import ChaosError


class Bench:
    """An injector of rank 0 whose faults are recorded, with the threads that fired them."""

    def __init__(self, *plan: PlannedFault) -> None:
        self.done: list[tuple[str, bool]] = []
        self.fired = threading.Event()
        self.injector = Injector(plan, rank=0, fired=MemoryFired(), action=self._act)

    def _act(self, kind: Kind, **_: Any) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        self.done.append((kind.value, in_main))
        self.fired.set()


def test_a_fault_fires_in_its_phase_only() -> None:
    bench = Bench(fail_at(0, phase="save", step=2), fail_at(0, phase="restore", kind="sigterm"))
    bench.injector.step(1)
    bench.injector.saving()
    assert bench.done == []
    bench.injector.restoring()
    assert bench.done == [("sigterm", True)]
    bench.injector.step(2)
    bench.injector.saving()
    bench.injector.saving()
    assert bench.done == [("sigterm", True), ("exception", True)]


def test_recovery_has_the_numbers_of_both_iterations() -> None:
    bench = Bench(
        fail_at(0, phase="recovery", iteration=1, kind="abort"),
        fail_at(0, phase="recovery", iteration=2, kind="sigkill"),
    )
    bench.injector.step(7, iteration=0)
    bench.injector.recovering(0, 0)  # finalize
    assert bench.done == []
    bench.injector.recovering(1, 0)  # initialize
    bench.injector.recovering(1, 0)
    assert bench.done == [("abort", True)]
    bench.injector.recovering(2, 1)  # as another rank
    assert bench.done == [("abort", True)]


def test_a_restore_counts_from_the_last_step_before_the_restart() -> None:
    bench = Bench(fail_at(0, phase="restore", step=5), fail_at(0, step=6, kind="sigterm"))
    bench.injector.entered(Call())
    bench.injector.restoring()
    bench.injector.step(5)
    bench.injector.entered(Call(iteration=1))
    assert bench.done == []
    bench.injector.restoring()
    assert bench.done == [("exception", True)]
    bench.injector.step(5)
    assert len(bench.done) == 1


@pytest.mark.parametrize("kind", ["sigkill", "exception"])
def test_a_phase_of_another_thread_waits_for_kinds_of_the_training_thread(kind: str) -> None:
    bench = Bench(fail_at(0, phase="committing", kind=kind))
    passed = threading.Event()

    def commit() -> None:
        bench.injector.committing()
        passed.set()

    committing = threading.Thread(target=commit)
    committing.start()
    if kind == "exception":
        while not bench.injector._left:  # until it waits
            passed.wait(0.001)
        assert not passed.is_set()
        bench.injector.step(1)
    assert passed.wait(60)
    committing.join()
    assert bench.done == [(kind, kind == "exception")]
    bench.injector.committing()
    bench.injector.step(2)
    assert len(bench.done) == 1


def test_an_impossible_fault_in_another_thread_is_an_error_of_the_training_thread() -> None:
    injector = Injector(
        [fail_at(0, phase="committing", kind="kill_monitor")], rank=0, fired=MemoryFired()
    )
    committing = threading.Thread(target=injector.committing)
    committing.start()
    committing.join()
    with pytest.raises(ChaosError, match="this rank has no monitor process"):
        injector.step(1)
    injector.step(2)


@pytest.mark.parametrize("kind", ["sigkill", "exception"])
def test_the_phase_collective_begins_with_the_next_call_of_one(kind: str) -> None:
    bench = Bench(fail_at(0, phase="collective", step=3, kind=kind))
    bench.injector.step(2)
    _all_reduce()
    bench.injector.step(3)
    assert bench.done == []
    _all_reduce()
    assert bench.fired.wait(60)
    assert bench.done == [(kind, kind == "exception")]
    bench.injector.step(4)
    _all_reduce()
    assert len(bench.done) == 1


def test_a_fault_of_the_writer_waits_until_there_is_one() -> None:
    bench = Bench(fail_at(0, kind="disk_full"), fail_at(0, kind="kill_writer"))
    bench.injector.start()
    try:
        bench.injector.step(1)
        assert bench.done == []
        assert bench.injector.writers is not None
    finally:
        bench.injector.close()


def test_every_phase_has_a_description() -> None:
    """A plan may name each of them; `docs/chaos.md` says when each begins."""
    page = (Path(__file__).parents[2] / "docs" / "chaos.md").read_text()
    assert [phase for phase in Phase if f"| `{phase}` |" not in page] == []
    assert [kind for kind in Kind if f"| `{kind}` |" not in page] == []


def _all_reduce() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(torch.zeros(1))

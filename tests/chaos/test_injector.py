"""`Injector`: when each fault fires, with an action that only records it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from chaos.in_memory import Call, MemoryFired, State
from fake_clock import FakeClock
from outlast import chaos
from outlast.chaos import Kind, Plan, PlannedFault, RandomFaults, fail_at, installed
from outlast.chaos.injector import Injector
from outlast.coordination.training_step import report_step
from outlast.errors import ChaosError
from outlast.inprocess import call_wrapper as observers


class Bench:
    """An injector of one rank with a fake clock, and the faults that it fired."""

    def __init__(
        self,
        plan: Plan | Sequence[PlannedFault],
        rank: int | None = 0,
        fired: MemoryFired | None = None,
    ) -> None:
        self.clock = FakeClock(100.0)
        self.done: list[str] = []
        self.more: list[dict[str, Any]] = []
        self.fired = fired or MemoryFired()
        self.injector = Injector(
            plan, rank=rank, clock=self.clock, fired=self.fired, action=self._act
        )

    def _act(self, kind: Kind, **more: Any) -> None:
        self.done.append(kind.value)
        self.more.append(more)


def test_a_fault_fires_at_its_step_once() -> None:
    bench = Bench([fail_at(0, step=3), fail_at(1, step=1)])
    for step in range(1, 3):
        bench.injector.step(step)
    assert bench.done == []
    for step in range(3, 6):
        bench.injector.step(step)
    assert bench.done == ["exception"]
    said = "a planned exception at iteration 0, step 3 (planned-0 of the plan)"
    assert bench.more[0]["message"] == said


def test_a_restarted_or_replaced_rank_does_not_get_the_fault_again() -> None:
    fired = MemoryFired()
    plan = [fail_at(1, step=3, kind="sigkill")]
    first = Bench(plan, rank=1, fired=fired)
    first.injector.step(3, iteration=0)
    first.injector.step(3, iteration=1)
    replacement = Bench(plan, rank=1, fired=fired)
    replacement.injector.step(3, iteration=1)
    assert first.done == ["sigkill"]
    assert replacement.done == []
    (record,) = fired.records()
    assert (record["kind"], record["rank"], record["step"]) == ("sigkill", 1, 3)
    assert record["time"] == 100.0


def test_the_rank_is_that_of_the_iteration() -> None:
    bench = Bench([fail_at(2, iteration=1)])
    bench.injector.entered(Call(iteration=0, state=State(rank=2)))
    bench.injector.entered(Call(iteration=1, state=State(rank=1)))
    assert bench.done == []
    bench.injector.entered(Call(iteration=1, state=State(rank=2)))
    assert bench.done == ["exception"]


def test_pings_are_steps_of_their_iteration() -> None:
    bench = Bench([fail_at(0, step=2)])
    call = Call()
    bench.injector.entered(call)
    bench.injector.pinged(call, 1)
    again = Call(iteration=1)
    bench.injector.entered(again)
    bench.injector.pinged(again, 1)
    assert bench.done == []
    bench.injector.pinged(again, 2)
    assert bench.done == ["exception"]


def test_pings_are_not_steps_once_the_script_reports_steps() -> None:
    bench = Bench([fail_at(0, step=60, kind="abort")])
    call = Call()
    bench.injector.entered(call)
    bench.injector.step(50)
    for ping in range(1, 100):
        bench.injector.pinged(call, ping)
    assert bench.done == []
    again = Call(iteration=1)
    bench.injector.entered(again)
    bench.injector.pinged(again, 70)
    assert bench.done == []
    bench.injector.step(60)
    assert bench.done == ["abort"]


def test_the_steps_of_a_job_count_instead_of_pings() -> None:
    bench = Bench([fail_at(0, step=60, kind="abort")])
    call = Call()
    with installed(bench.injector):
        bench.injector.entered(call)
        report_step(59, completed=True)
        bench.injector.pinged(call, 70)
        report_step(60)  # it is only saved
        assert bench.done == []
        report_step(60, completed=True)
        assert bench.done == ["abort"]


def test_the_steps_of_a_job_do_not_count_once_the_script_reports_steps() -> None:
    bench = Bench([fail_at(0, step=60, kind="abort")])
    with installed(bench.injector):
        bench.injector.step(59)
        report_step(60, completed=True)
        assert bench.done == []
        bench.injector.step(60)
        assert bench.done == ["abort"]


def test_a_timed_fault_fires_at_the_next_ping() -> None:
    bench = Bench([fail_at(0, after_seconds=3.0, kind="hang")])
    call = Call()
    bench.injector.entered(call)
    bench.clock.advance(2.5)
    bench.injector.pinged(call, 1)
    assert bench.done == []
    bench.clock.advance(0.5)
    bench.injector.pinged(call, 2)
    assert bench.done == ["hang"]


def test_the_monitor_of_the_call_is_killed() -> None:
    bench = Bench([fail_at(0, kind="kill_monitor")])
    bench.injector.entered(Call(monitor_pid=77))
    assert bench.more[0]["monitor_pid"] == 77


def test_faults_due_together_fire_in_the_order_of_the_plan() -> None:
    bench = Bench([fail_at(0, kind="sigstop"), fail_at(0, kind="sigterm")])
    bench.injector.entered(Call())
    assert bench.done == ["sigstop", "sigterm"]


def test_a_planned_exception_is_raised() -> None:
    injector = Injector([fail_at(0, step=1)], rank=0, fired=MemoryFired())
    with pytest.raises(ChaosError, match="a planned exception at iteration 0, step 1"):
        injector.step(1)
    injector.step(2)


def test_the_rank_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    bench = Bench([fail_at(0)], rank=None)
    with pytest.raises(ValueError, match="the rank is unknown"):
        bench.injector.step(1)
    bench.injector.step(1, rank=0)
    monkeypatch.setenv("RANK", "3")
    bench = Bench([fail_at(3)], rank=None)
    bench.injector.step(1)
    assert bench.done == ["exception"]


def test_random_faults_are_limited() -> None:
    random = RandomFaults(seed=7, rate_per_step=0.5, kinds=(Kind.ABORT, Kind.HANG), max_faults=3)
    fired = MemoryFired()
    ranks = [Bench(Plan(random=random), rank=rank, fired=fired) for rank in range(4)]
    for step in range(1, 100):
        for bench in ranks:
            bench.injector.step(step)
    done = [bench.done for bench in ranks]
    assert sum(map(len, done)) == 3

    again = MemoryFired()
    ranks = [Bench(Plan(random=random), rank=rank, fired=again) for rank in range(4)]
    for step in range(1, 100):
        for bench in ranks:
            bench.injector.step(step)
    assert [bench.done for bench in ranks] == done


def test_no_random_fault_at_an_entry() -> None:
    random = RandomFaults(seed=7, rate_per_step=1.0, kinds=(Kind.ABORT,), max_faults=9)
    bench = Bench(Plan(random=random))
    bench.injector.entered(Call())
    assert bench.done == []
    bench.injector.pinged(Call(), 1)
    assert bench.done == ["abort"]


def test_no_random_fault_at_a_ping_once_the_script_reports_steps() -> None:
    random = RandomFaults(seed=7, rate_per_step=1.0, kinds=(Kind.ABORT,), max_faults=9)
    bench = Bench(Plan(random=random))
    bench.injector.step(50)
    assert bench.done == ["abort"]
    again = Call(iteration=1)
    bench.injector.entered(again)
    bench.injector.pinged(again, 1)
    assert bench.done == ["abort"]


def test_an_interrupt_before_the_action_releases_the_claim() -> None:
    class Interrupted(MemoryFired):
        def claim(self, key: str, record: dict[str, Any]) -> bool:
            taken = super().claim(key, record)
            record.clear()
            return taken

    bench = Bench([fail_at(0, step=1)], fired=Interrupted())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outlast.chaos.injector.log.warning", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.injector.step(1)
    assert bench.done == []
    bench.injector.step(1)
    assert bench.done == ["exception"]


def test_the_timer_fires_only_kinds_for_any_thread() -> None:
    acted = threading.Event()
    done: list[tuple[Kind, str]] = []

    def act(kind: Kind, **_: Any) -> None:
        done.append((kind, threading.current_thread().name))
        acted.set()

    plan = [
        fail_at(0, after_seconds=0.0, kind="hang"),  # needs the main thread
        fail_at(0, after_seconds=0.0, step=5, kind="abort"),
        fail_at(0, after_seconds=0.01, kind="sigterm"),
    ]
    injector = Injector(plan, rank=0, fired=MemoryFired(), action=act)
    injector.start()
    assert acted.wait(timeout=60)
    injector.close()
    assert done == [(Kind.SIGTERM, "outlast-chaos-timer")]


def test_close_ends_a_waiting_timer() -> None:
    injector = Injector([fail_at(0, after_seconds=1e5, kind="abort")], rank=0, fired=MemoryFired())
    injector.start()
    injector.close()
    assert "outlast-chaos-timer" not in [thread.name for thread in threading.enumerate()]


def test_the_module_uses_the_installed_injector() -> None:
    chaos.step(1)  # nothing is installed
    bench = Bench([fail_at(0, step=5)])
    with chaos.installed(bench.injector) as injector:
        assert injector in observers.observers()
        with pytest.raises(RuntimeError, match="installed already"):
            chaos.install(bench.injector)
        chaos.step(5)
    assert bench.done == ["exception"]
    assert observers.observers() == ()
    chaos.step(6)
    chaos.uninstall()  # has no effect

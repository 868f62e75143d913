"""The scheduler of the simulation itself."""

from __future__ import annotations

import pytest

from outlast.coordination.ops import Link
from outlast.coordination.stores.store import KeyTimeout
from simulation.scheduler import Deadlock, Simulation


def simulation(seed: int) -> Simulation:
    return Simulation(seed, lambda task, op: None)


async def count(times: int) -> int:
    last = 0
    for _ in range(times):
        last = await Link().add("n", 1)
    return last


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    def trace(seed: int) -> list[str]:
        sim = simulation(seed)
        for name in "abc":
            sim.spawn(name, count(5))
        sim.run()
        return sim.trace

    assert trace(1) == trace(1)
    assert len({tuple(trace(seed)) for seed in range(20)}) > 10


def test_results_and_errors_are_kept() -> None:
    async def fail() -> None:
        await Link().add("n", 1)
        raise ValueError("mine")

    sim = simulation(0)
    good, bad = sim.spawn("good", count(3)), sim.spawn("bad", fail())
    sim.run()
    assert good.value in (3, 4)
    assert isinstance(bad.error, ValueError)


def test_a_deadlock_is_found_and_says_who_waits_for_what() -> None:
    async def wait(key: str) -> None:
        await Link().wait_for(key, None)

    sim = simulation(0)
    sim.spawn("a", wait("x"))
    sim.spawn("b", wait("y"))
    with pytest.raises(Deadlock, match="a at wait_for x; b at wait_for y"):
        sim.run()


def test_a_run_without_end_is_found() -> None:
    async def spin() -> None:
        while True:
            await Link().read("k")

    sim = simulation(0)
    sim.spawn("a", spin())
    with pytest.raises(Deadlock, match="still running after 100 steps"):
        sim.run(max_steps=100)


def test_time_moves_to_the_earliest_deadline_when_nobody_can_go_on() -> None:
    order: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        with pytest.raises(KeyTimeout):
            await Link().wait_for("never", seconds)
        order.append((name, sim.clock.now()))

    sim = simulation(0)
    sim.spawn("late", wait("late", 9.0))
    sim.spawn("early", wait("early", 2.0))
    sim.run()
    assert order == [("early", 2.0), ("late", 9.0)]
    assert [key for _, key in sim.timeouts] == ["never", "never"]


def test_the_dead_do_nothing_more() -> None:
    sim = simulation(0)
    task = sim.spawn("a", count(1000))
    sim.run(each=lambda: sim.kill(task) if sim.steps == 10 and task.op else None)
    assert task.killed
    assert sim.store.read("n") == b"9"

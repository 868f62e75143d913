"""Hosts and ranks that leave a job, and that join it, after a step that the ranks agree on, with a
death at any operation in between; and mutations of that protocol, which the simulation must detect.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from inprocess.mutations import mutate, simulation_finds
from outlast.coordination import moves
from outlast.coordination.deciding import Decisions
from outlast.coordination.ops import drive, perform_on
from outlast.errors import RankMoved
from outlast.events.restart_causes import MOVED, RestartCount
from outlast.inprocess.recovery.state_machine import Machine
from simulation.fault_budget import Schedule
from simulation.simulate import Result, simulate
from simulation.simulated_job import SimulatedJob

_CHUNK = 50


def schedule(seed: int) -> Schedule:
    """A schedule of a job of which ranks leave, for as long as any that can has not left."""
    r = random.Random(f"moving {seed}")
    return dataclasses.replace(
        Schedule.of(seed),
        members=r.randint(2, 6),
        per_host=(per_host := r.choice([0, 2])),
        host_losses=r.choice([0, 1]) if per_host else 0,
        moves=r.choice([1, 2, 4]),
        patient=True,
        deaths=r.choice([0, 1, 2]),
        faults=r.choice([0, 1]),
        leaves=0,
        aborts=0,
        p_death=r.choice([0.002, 0.01]),
        stops=r.choice([0, 0, 0, 1]),
        joins=r.choice([0, 2]),
    )


def moving(seed: int) -> Result:
    return simulate(seed, schedule(seed))


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(_CHUNK, 400, _CHUNK)),
        *(
            pytest.param(n, marks=[pytest.mark.slow, pytest.mark.exhaustive])
            for n in range(400, 4000, _CHUNK)
        ),
    ],
)
def test_no_move_breaks_what_must_always_hold(first: int) -> None:
    results = [moving(seed) for seed in range(first, first + _CHUNK)]
    left = [e for r in results for e in r.raised.values() if isinstance(e, RankMoved)]
    assert len(left) > _CHUNK / 5


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [0, 2])
@pytest.mark.parametrize("reserve", [0, 1])
def test_a_move_without_a_fault_is_the_only_restart_and_keeps_the_ranks(
    per_host: int, reserve: int
) -> None:
    quiet = Schedule(4, 0, 0, 0, 0, 0, 0, moves=3, patient=True, reserve=reserve, per_host=per_host)
    left = 0
    for seed in range(15):
        job = SimulatedJob(seed, quiet)
        job.sim.run(each=job.before_step)
        job.invariants.finish(job.ended, job.born)
        alone = [move for move in job.moves.open if move.asks is not None]
        assert alone or set(job.invariants.sizes.values()) == {4}
        membership = job.ended[0][1].machine.membership
        counts = drive(membership.restart_counts(), perform_on(job.sim.store))
        made = len(job.invariants.sizes) - 1
        assert counts == ((RestartCount(MOVED, made),) if made else ())
        left += sum(isinstance(task.error, RankMoved) for task, _ in job.ended)
    assert left >= 5


def test_a_rank_that_dies_before_its_host_has_left_has_one_process_more_and_not_two() -> None:
    replaced = 0
    for seed in (14, 18, 23, 96, 117, 297, 342):  # in which that happens
        r = random.Random(f"replacing {seed}")
        moving = dataclasses.replace(
            schedule(seed), members=4, per_host=2, joins=0, stops=0, deaths=r.choice([2, 3, 4])
        )
        job = SimulatedJob(seed, dataclasses.replace(moving, p_death=r.choice([0.02, 0.05])))
        job.sim.run(each=job.before_step)
        job.invariants.finish(job.ended, job.born)
        alone = [move for move in job.moves.open if move.asks is not None]
        assert alone or max(job.invariants.sizes.values(), default=0) <= 4
        replaced += job.moves.replaced
    assert replaced


# Each: the function, a text in its source, and the replacement.
MUTATIONS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a rank leaves before the others of its host have a successor": (
        moves.succeed,
        "if members and asked.issuperset(members):",
        "if members:",
    ),
    "rank 0 is not woken by a request": (
        moves.request_leave,
        'await membership.link.put(leave_key(iteration, number), b"1")',
        "pass",
    ),
    "a request is told to an iteration that is over": (
        moves.request_leave,
        "await membership.current(), len(",
        "0, len(",
    ),
    "a rank of the reserve is not asked": (
        Machine._complete,
        "if not active and (",
        "if False and (",
    ),
    "a request that a fault overtakes is forgotten": (
        moves.requests,
        "present.intersection(e.members)",
        "False",
    ),
    "joiners that were admitted are asked for again": (
        moves.requests,
        "not out.issuperset(e.joiners)",
        "bool(e.joiners)",
    ),
    "a successor counts while its predecessor is there": (
        Decisions._facts,
        "if j.succeeds < 0 or j.succeeds in lost",
        "",
    ),
}


def test_each_mutation_changes_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for mutation in MUTATIONS.values():
        with monkeypatch.context() as undone:
            mutate(undone, *mutation)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulation_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation_finds(monkeypatch, MUTATIONS[name], moving, 500)

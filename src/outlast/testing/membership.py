"""The whole membership protocol under deterministic simulation.

The real state machine (`recovery/machine.py`) and the real protocol run for N members in one
process. The seed picks every interleaving, every death (of a main process between any two store
operations, of its monitor while it reports), every fault, newcomer and delay, and live members that
are taken for lost. A failure names its seed: `simulate(seed)` replays it. What is checked:

* R1 whoever enters k finds ranks dense from 0 and one world size; no live member is left out, nor
  is one who asked in time; nobody is in who was known to be lost.
* R2 nobody decides what follows k, or enters k+1, while a live member is in k, `initialize` and
  `finalize` included.
* R5 every run ends, without the help of any backstop or timeout, and each member with a value or
  with the error that it was given. Values are returned only if all of the view have finished.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from outlast.inprocess.recovery.contract import GrowPolicy
from outlast.testing.world import SimulatedWorld

__all__ = ["Result", "Schedule", "simulate"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a seed may do. Probabilities are per step of the simulation, budgets per run.

    Attributes:
        members: how many start.
        deaths, double_deaths: of main processes, and of monitors while they report one.
        suspicions: live members that are taken for lost.
        faults, leaves, aborts: exceptions that restart, that end a member, that end the job.
        joins: new processes, mostly in the place of a dead one.
        p_death: of a death, in each step.
        grow, divisor, reserve, await_full: the policies.
    """

    members: int = 4
    deaths: int = 3
    faults: int = 4
    joins: int = 3
    leaves: int = 1
    aborts: int = 0
    double_deaths: int = 1
    suspicions: int = 0
    p_death: float = 0.01
    grow: GrowPolicy = GrowPolicy.AT_ONCE
    divisor: int = 1
    reserve: int = 0
    await_full: bool = False

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """A schedule that covers the options, by seed."""
        r = random.Random(f"schedule {seed}")
        return cls(
            members=r.randint(1, 6),
            deaths=r.randint(0, 4),
            faults=r.randint(0, 4),
            joins=r.randint(0, 4),
            leaves=r.randint(0, 2),
            aborts=int(r.random() < 0.1),
            double_deaths=r.randint(0, 2),
            suspicions=r.choice([0, 0, 0, 1, 2]),
            p_death=r.choice([0.002, 0.01, 0.05]),
            grow=r.choice(list(GrowPolicy)),
            divisor=r.choice([1, 1, 1, 2]),
            reserve=r.choice([0, 0, 1]),
            await_full=r.random() < 0.2,
        )


@dataclasses.dataclass
class Result:
    """How a run ended: by member name, what it returned or raised; and what it took."""

    returned: dict[str, Any]
    raised: dict[str, BaseException]
    iterations: int
    steps: int
    seconds: float


def simulate(seed: int, schedule: Schedule | None = None) -> Result:
    """Runs one schedule to its end.

    Raises:
        AssertionError: if an invariant does not hold, or the run does not end. The message ends
            with the seed and the last steps.
    """
    world = SimulatedWorld(seed, schedule or Schedule.of(seed))
    sim = world.sim
    try:
        sim.run(each=world.before_step)
        world.invariants.finish(world.ended, world.born)
    except AssertionError as e:
        tail = "\n".join(sim.trace[-60:])
        what = "; ".join(world.invariants.broken) or str(e)
        raise AssertionError(f"{what}\nseed {seed}: {world.schedule}\n{tail}") from e
    return Result(
        returned={task.name: task.value for task, _ in world.ended if task.error is None},
        raised={task.name: task.error for task, _ in world.ended if task.error is not None},
        iterations=max(world.invariants.sizes, default=-1) + 1,
        steps=sim.steps,
        seconds=sim.clock.now(),
    )

"""One simulated run of the whole membership protocol, from a seed.

The seed decides every interleaving, every death (of a main process between any two store
operations, of its monitor while it reports), every fault, joiner and delay, live members that are
reported as lost, and hosts that are lost with all that runs on them (`simulated_hosts`).
`invariants` checks:

* R1 every member that enters iteration k has the same world size, with ranks dense from 0; no live
  member is left out, nor is one that asked in time; no member known to be lost is included.
* R2 no member decides the view after k, or enters k+1, while a live member is in k, which includes
  `initialize` and `finalize`.
* R5 every run ends, without the help of any backstop or timeout, and each member ends with a value
  or with the error that it was given. Values are returned only if all of the view have finished.
* R6 all members name the same first cause of a restart.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from simulation.fault_budget import Schedule
from simulation.simulated_job import SimulatedJob


@dataclasses.dataclass
class Result:
    """How a run ended: what each member returned or raised, by name; and the cost of the run."""

    returned: dict[str, Any]
    raised: dict[str, BaseException]
    iterations: int
    steps: int
    seconds: float


def simulate(seed: int, schedule: Schedule | None = None) -> Result:
    """Runs one schedule to its end. If it does not end, or an invariant does not hold, raises an
    `AssertionError` that ends with the seed and the last steps.
    """
    job = SimulatedJob(seed, schedule or Schedule.of(seed))
    sim = job.sim
    try:
        sim.run(each=job.before_step)
        job.invariants.finish(job.ended, job.born)
    except AssertionError as e:
        tail = "\n".join(sim.trace[-60:])
        what = "; ".join(job.invariants.broken) or str(e)
        raise AssertionError(f"{what}\nseed {seed}: {job.schedule}\n{tail}") from e
    return Result(
        returned={task.name: task.value for task, _ in job.ended if task.error is None},
        raised={task.name: task.error for task, _ in job.ended if task.error is not None},
        iterations=max(job.invariants.sizes, default=-1) + 1,
        steps=sim.steps,
        seconds=sim.clock.now(),
    )

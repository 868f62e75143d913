"""Rank 1 fails in a phase of the restart, in the way that the command line names.

python phases.py fails_in_phase finalize raise
"""

from __future__ import annotations

import os
import sys
import threading

from rank import main, say, scenario, wrapped
from rank_actions import SHORT, Finalized, Told, die, finish, join_group, rank, wait_forever

from outlast.coordination.membership import MembershipProtocol
from outlast.inprocess import CallWrapper, State
from outlast.inprocess.abort import AbortTorchDistributed
from outlast.inprocess.finalize import Finalize
from outlast.inprocess.health_check import HealthCheck
from outlast.inprocess.initialize import Initialize
from outlast.inprocess.rank_assignment import ShiftRanks
from outlast.inprocess.rank_filter import RankFilter

# The phase in which rank 1 fails, and how. It fails once; in `initialize` at iteration 1, so that
# the fault occurs during a restart.
PHASE, HOW = (*sys.argv[2:4], "", "")[:2]
FIRST_RANK = int(os.environ["RANK"])
_failed = False


def _here(phase: str, iteration: int) -> None:
    global _failed
    say("phase", phase=phase, iteration=iteration)
    if _failed or phase != PHASE or FIRST_RANK != 1:
        return
    if phase in ("initialize", "assignment", "filter") and iteration != 1:
        return
    if phase == "health_check" and threading.current_thread() is not threading.main_thread():
        return
    _failed = True
    if HOW == "die":
        die()
    if HOW == "hang":
        wait_forever()
    while HOW == "loop":
        pass  # executes Python: that is no progress after a fault
    raise OSError(f"a planned fault in {phase}")


class Init(Initialize):
    def __call__(self, state: State) -> State:
        _here("initialize", state.iteration)
        return state


class Abort(AbortTorchDistributed):
    def __call__(self, state: State) -> State:
        super().__call__(state)
        _here("abort", state.iteration)
        return state


class Final(Finalize):
    def __call__(self, state, train_ex=None):
        _here("finalize", state.iteration)
        return state, train_ex


class Health(HealthCheck):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state, train_ex=None):
        self.calls += 1
        if self.calls > 1:  # not the one before the first iteration
            _here("health_check", state.iteration)
        return state, train_ex


class Assignment(ShiftRanks):
    def __call__(self, state, terminated_ranks):
        _here("assignment", state.iteration)
        return super().__call__(state, terminated_ranks)


class Filter(RankFilter):
    def __call__(self, state: State) -> State:
        _here("filter", state.iteration)
        return state


def _rank_0_fails_once(call: CallWrapper) -> int:
    """The cause of the restart; the ranks then run all its phases."""
    join_group()
    if call.iteration == 0:
        if rank() == 0:
            raise ValueError("the first fault")
        wait_forever()
    return finish()


@scenario
@wrapped(
    initialize=Init(),
    abort=Abort(),
    finalize=Final(),
    health_check=Health(),
    rank_assignment=Assignment(),
    rank_filter=Filter(),
    **(SHORT if HOW in ("hang", "loop") else {}),
)
def fails_in_phase(call: CallWrapper) -> int:
    return _rank_0_fails_once(call)


class FailsFirst(HealthCheck):
    """Rank 1 fails before the function, once or ("always") after the restart as well."""

    def __init__(self, how: str) -> None:
        self.how, self.failed = how, False

    def __call__(self, state, train_ex=None):
        say("checked", iteration=state.iteration, train_ex=repr(train_ex))
        if FIRST_RANK == 1 and (not self.failed or self.how == "always"):
            self.failed = True
            raise OSError("the device does not answer")
        return state, train_ex


@scenario
@wrapped(health_check=FailsFirst(PHASE))
def fails_the_first_check(call: CallWrapper) -> int:
    join_group()
    return finish()


@scenario
def dies_at_the_barrier() -> None:
    """Rank 2 delays the restart in `finalize` while the test kills rank 1 at the barrier."""
    told = Told()

    class Held(Finalized):
        def __call__(self, state, train_ex=None):
            super().__call__(state, train_ex)
            if state.initial_rank == 2:
                told.wait()
            return state, train_ex

    train = wrapped(finalize=Held())(_rank_0_fails_once)
    train()


@scenario
def dies_before_it_registers() -> None:
    """Rank 1 dies when its monitor has started and nothing else has happened."""
    register, main_process = MembershipProtocol.register, os.getpid()

    async def registering(self: MembershipProtocol, *args: object) -> int | None:
        if os.getpid() == main_process:  # its monitor registers for it
            die()
        return await register(self, *args)  # type: ignore[arg-type]

    if FIRST_RANK == 1:
        MembershipProtocol.register = registering  # type: ignore[assignment,method-assign]

    @wrapped(initialize=Init(), abort=Abort(), finalize=Final())
    def train(call: CallWrapper) -> int:
        join_group()
        return finish()

    train()


if __name__ == "__main__":
    main()

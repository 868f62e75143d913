"""Ranks that fail in the function, each in its own way; the others are in a collective."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist
from rank import main, say, scenario, wrapped
from rank_actions import Finalized, Told, collective, die, finish, join_group, rank, wait_forever

from outlast.errors import RankShouldRestart
from outlast.inprocess import CallWrapper


@scenario
@wrapped()
def one_fails(call: CallWrapper) -> int:
    """Rank 1 fails in the way that the command line names."""
    count = join_group()
    say("met", iteration=call.iteration, count=count)
    if call.iteration == 0:
        if rank() == 1:
            _fail(sys.argv[2])
        collective()  # never ends by itself: rank 1 does not take part
    return finish()


def _fail(fault: str) -> None:
    if fault == "exception":
        raise ValueError("a planned fault")
    if fault == "exit":
        sys.exit(3)
    if fault == "asked":
        raise RankShouldRestart("once more, please")
    die()


@scenario
def one_leaves_late() -> None:
    """Rank 1 fails; rank 2 cannot leave until the test allows it; the others must wait."""
    told = Told()

    @wrapped(finalize=Finalized())
    def train(call: CallWrapper) -> int:
        join_group()
        if call.iteration == 0:
            if rank() == 2:
                with call.atomic():
                    dist.barrier()
                    told.wait()
                    return -1
            dist.barrier()
            if rank() == 1:
                raise ValueError("a planned fault")
            wait_forever()
        return finish()

    train()


@scenario
@wrapped(repeated_faults=None)
def all_fail_at_once(call: CallWrapper) -> int:
    join_group()
    if call.iteration < 40:
        dist.barrier()
        raise ValueError(f"rank {rank()} fails in iteration {call.iteration}")
    return finish()


@scenario
@wrapped()
def one_has_returned(call: CallWrapper) -> int:
    """Ranks 0 and 2 return; rank 1 fails when they wait for it."""
    join_group()
    if call.iteration == 0 and rank() == 1:
        store = call.state.store
        store.wait(["returned/0", "returned/2"])
        raise ValueError("a planned fault")
    if call.iteration:
        finish()
    else:
        call.state.store.set(f"returned/{rank()}", "1")
    return 10 * call.iteration + rank()


@scenario
@wrapped()
def all_but_one_die(call: CallWrapper) -> int:
    if join_group() > 1:
        if call.state.initial_rank != 1:
            die()
        collective()
    return finish()


@scenario
@wrapped()
def no_groups(call: CallWrapper) -> int:
    """A function without torch.distributed."""
    if call.iteration == 0:
        _fail_beside_the_other(0, call)
        wait_forever()
    return rank()


@scenario
@wrapped()
def swallows(call: CallWrapper) -> int:
    """Rank 0's function swallows the first interrupts, until there were three."""
    if call.iteration == 0:
        if rank() == 1:
            _fail_beside_the_other(1, call)
        for number in range(3):
            try:
                if number == 0:  # in the block: the first interrupt may come right after
                    _fail_beside_the_other(1, call)
                time.sleep(1000)
            except BaseException as swallowed:  # noqa: BLE001 - what this is about
                say("swallowed", type=type(swallowed).__name__)
        wait_forever()
    return rank()


def _fail_beside_the_other(failing: int, call: CallWrapper) -> None:
    """One of two ranks fails when the other is certainly in the function."""
    if rank() == failing:
        call.state.store.wait(["in"])
        raise ValueError("a planned fault")
    call.state.store.set("in", "1")


if __name__ == "__main__":
    main()

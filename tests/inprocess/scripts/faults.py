"""Ranks that fail in the function, each in its own way; the others are in a collective."""

from __future__ import annotations

import sys
import threading
import time

import torch.distributed as dist
from rank import (
    Told,
    collective,
    die,
    finish,
    join_group,
    main,
    observed,
    rank,
    report,
    say,
    scenario,
    wait_forever,
)

from outlast import inprocess
from outlast.errors import RankShouldRestart
from outlast.inprocess import CallWrapper, Wrapper


def _train(fault: str, call: CallWrapper) -> int:
    count = join_group()
    say("met", iteration=call.iteration, count=count)
    if call.iteration == 0:
        if rank() == 1:
            _fail(fault)
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
def one_fails() -> None:
    fault = sys.argv[2]

    @Wrapper()
    @observed
    def train(call: CallWrapper) -> int:
        return _train(fault, call)

    report(train)  # type: ignore[call-arg]


@scenario
def one_leaves_late() -> None:
    """Rank 1 fails; rank 2 cannot leave until the test says so; the others must not go on."""
    told = Told()

    class Finalized(inprocess.finalize.Finalize):
        def __call__(self, state, train_ex=None):
            say("finalized", iteration=state.iteration)
            return state, train_ex

    @Wrapper(finalize=Finalized())
    @observed
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

    report(train)  # type: ignore[call-arg]


@scenario
def all_fail_at_once() -> None:
    @Wrapper()
    @observed
    def train(call: CallWrapper) -> int:
        join_group()
        if call.iteration < 40:
            dist.barrier()
            raise ValueError(f"rank {rank()} fails in iteration {call.iteration}")
        return finish()

    report(train)  # type: ignore[call-arg]


@scenario
def one_has_returned() -> None:
    """Ranks 0 and 2 return; rank 1 fails when they wait for it."""

    @Wrapper()
    @observed
    def train(call: CallWrapper) -> int:
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

    report(train)  # type: ignore[call-arg]


@scenario
def all_but_one_die() -> None:
    @Wrapper()
    @observed
    def train(call: CallWrapper) -> int:
        if join_group() > 1:
            if call.state.initial_rank != 1:
                die()
            collective()
        return finish()

    report(train)  # type: ignore[call-arg]


@scenario
def no_groups() -> None:
    """A function that has nothing to do with torch.distributed."""

    @Wrapper()
    @observed
    def train(call: CallWrapper) -> int:
        if call.iteration == 0:
            if rank() == 0:
                call.state.store.wait(["in"])
                raise ValueError("a planned fault")
            call.state.store.set("in", "1")
            wait_forever()
        return rank()

    report(train)  # type: ignore[call-arg]


@scenario
def swallows() -> None:
    """Rank 0's function swallows every interrupt, until there were three."""

    @Wrapper()
    @observed
    def train(call: CallWrapper) -> int:
        if call.iteration == 0:
            if rank() == 1:
                call.state.store.wait(["in"])
                raise ValueError("a planned fault")
            call.state.store.set("in", "1")
            for _ in range(3):
                try:
                    time.sleep(1000)
                except BaseException as swallowed:  # noqa: BLE001 - what this is about
                    say("swallowed", type=type(swallowed).__name__)
            threading.Event().wait()
        return rank()

    report(train)  # type: ignore[call-arg]


if __name__ == "__main__":
    main()

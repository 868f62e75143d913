"""Ranks that are replaced: the test kills rank 1, and starts a new process in its place."""

from __future__ import annotations

import sys

from acts import Told, collective, finish, join_group, seconds
from rank import main, say, scenario, wrapped

from outlast.events import Event, Joined, NullSink
from outlast.inprocess import CallWrapper, Compose, GrowPolicy
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

ASKED = sys.argv[2] if len(sys.argv) > 2 else ""


class Asks(NullSink):
    """Tells the test that a newcomer has asked to take part."""

    def write(self, event: Event) -> None:
        if isinstance(event, Joined):
            say("asks")


@scenario
def replaced() -> None:
    """When one is missing, the others go on until the test tells rank 0 something."""
    told = Told()

    @wrapped(grow_policy=GrowPolicy[ASKED], event_sink=Asks())
    def train(call: CallWrapper) -> int:
        size = join_group()
        say("ready", iteration=call.iteration, size=size)
        if call.iteration == 0:
            collective()
            told.wait()
        elif size < 3:
            if call.state.initial_rank == 0:
                told.wait()
                if ASKED == "AT_NEXT_RESTART":
                    raise ValueError("the next restart")
            collective()
        return finish()

    train()


@scenario
def awaited() -> None:
    """The restart is held for a replacement, for as long as the command line says."""
    hold = seconds(float(sys.argv[2]))
    told = Told()

    @wrapped(rank_assignment=Compose(ShiftRanks(), AwaitReplacements(hold)))
    def train(call: CallWrapper) -> int:
        size = join_group()
        say("ready", iteration=call.iteration, size=size)
        if call.iteration == 0:
            told.wait()
        return finish()

    train()


if __name__ == "__main__":
    main()

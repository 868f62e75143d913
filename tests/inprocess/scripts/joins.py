"""Ranks that are replaced: the test kills rank 1, and starts a replacement."""

from __future__ import annotations

import sys

from rank import main, say, scenario, wrapped
from rank_actions import Told, collective, finish, join_group, seconds, wait_forever

from outlast.events.emitter import NullSink
from outlast.events.event import Event
from outlast.events.types import Joined
from outlast.inprocess import CallWrapper, Compose, GrowPolicy
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

ASKED = sys.argv[2] if len(sys.argv) > 2 else ""


class Asks(NullSink):
    """Reports to the test that a new process has asked to join."""

    def write(self, event: Event) -> None:
        if isinstance(event, Joined):
            say("asks")


@scenario
def replaced() -> None:
    """When a rank is missing, the others continue until the test writes to rank 0."""
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
    """The restart is held for a replacement, for the time that the command line names."""
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


@scenario
def held() -> None:
    """The restart is held by default; with `raises`, rank 0 fails once more after it."""

    @wrapped()
    def train(call: CallWrapper) -> int:
        size = join_group()
        say("ready", iteration=call.iteration, size=size)
        if call.iteration == 0:
            wait_forever()
        if call.iteration == 1 and ASKED == "raises" and call.state.rank == 0:
            raise ValueError("once more")
        return finish()

    train()


if __name__ == "__main__":
    main()

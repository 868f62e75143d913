"""Shared by the rank scripts: they print JSON lines and run a named scenario.

@scenario
@wrapped()
def fails_once(call: CallWrapper) -> int: ...

main()                                 # python script.py fails_once
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from outlast import inprocess
from outlast.errors import RankFault

SCENARIOS: dict[str, Callable[[], Any]] = {}


def say(event: str, **fields: Any) -> None:
    """Prints one line in one write: an interrupt comes before it or after it."""
    line = json.dumps({"event": event, "t": time.monotonic(), **fields}, default=str)
    os.write(1, line.encode() + b"\n")


def observed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function report when it is entered and when it has been left, in any way."""

    @functools.wraps(function)
    def observing(call: inprocess.CallWrapper) -> Any:
        _entered(call)
        try:
            try:
                return function(call)
            finally:  # a repeated interrupt may arrive here, hence the second one
                say("left", iteration=call.iteration)
        finally:
            say("left", iteration=call.iteration)

    return observing


def _entered(call: inprocess.CallWrapper) -> None:
    state = call.state
    say(
        "entered",
        iteration=call.iteration,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        initial_rank=state.initial_rank,
        pid=os.getpid(),
    )


def wrapped(**options: Any) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """Wraps a function with these options; the function and its calls report what happens."""

    def decorate(function: Callable[..., Any]) -> Callable[[], Any]:
        restarted = inprocess.Wrapper(**options)(observed(function))

        @functools.wraps(function)
        def reporting() -> Any:
            return report(restarted)

        return reporting

    return decorate


def report(wrapped: Callable[[], Any]) -> Any:
    """Calls a wrapped function and reports the result. An error ends the process with code 1."""
    try:
        value = wrapped()
    except BaseException as error:
        cause = error.__cause__
        say("raised", type=type(error).__name__, message=str(error), cause=repr(cause))
        if isinstance(cause, RankFault):
            where = {"rank": cause.rank, "host": cause.host, "message": cause.args[0]}
            say("cause", **where, traceback=cause.remote_traceback)
        raise
    say("returned", value=value)
    return value


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a function as a scenario for the command line."""
    SCENARIOS[function.__name__] = function
    return function


def main() -> None:
    """Runs the scenario that the command line names."""
    SCENARIOS[sys.argv[1]]()

"""What all rank scripts share: they speak in JSON lines, and run the scenario that they are told.

@scenario
def fails_once() -> None: ...

main()                                 # python script.py fails_once
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outlast import inprocess
from outlast.errors import RankFault

FOREVER_S = 100_000.0
SCENARIOS: dict[str, Callable[[], None]] = {}


def say(event: str, **fields: Any) -> None:
    """One line, in one write: an interrupt comes before it or after it."""
    line = json.dumps({"event": event, "t": time.monotonic(), **fields}, default=str)
    os.write(1, line.encode() + b"\n")


def observed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function say when it is entered and when it has been left, whatever happens to it."""

    @functools.wraps(function)
    def observing(call: inprocess.CallWrapper) -> Any:
        _entered(call)
        try:
            try:
                return function(call)
            finally:  # the interrupt is repeated, and may come just here; so once more below
                say("left", iteration=call.iteration)
        finally:
            say("left", iteration=call.iteration)

    return observing


def _entered(call: inprocess.CallWrapper) -> None:
    state = call.state
    say(
        "entered",
        iteration=call.iteration,
        rank=rank(),
        world_size=int(os.environ["WORLD_SIZE"]),
        initial_rank=state.initial_rank,
        pid=os.getpid(),
    )


def join_group() -> int:
    """Makes the process group, and sees that it works; returns the world size."""
    dist.init_process_group("gloo")
    return collective()


def collective() -> int:
    """An all-reduce; returns how many ranks took part."""
    count = torch.ones(1)
    dist.all_reduce(count)
    return int(count)


def finish() -> int:
    """Ends the process group; returns this rank."""
    dist.barrier()
    dist.destroy_process_group()
    return int(os.environ["RANK"])


def report(wrapped: Callable[[], Any]) -> Any:
    """Calls a wrapped function and says how that ended. An error ends the process with code 1."""
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


def rank() -> int:
    """This rank, as it is now."""
    return int(os.environ["RANK"])


def die() -> None:
    """Ends this process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_forever() -> None:
    """Blocks until the interrupt."""
    threading.Event().wait(FOREVER_S)


def wait_until_asleep() -> None:
    """Waits until the main thread of this process sleeps in the kernel, and stays there."""
    status = Path(f"/proc/self/task/{os.getpid()}/status")
    before: list[str] = []
    while True:
        now = [x for x in status.read_text().splitlines() if x.startswith(("State", "voluntary"))]
        if now == before and now[0].split()[1] == "S":  # no switch since: the same sleep
            return
        before = now
        time.sleep(0.02)


class Told:
    """The test says "go on" with a signal: SIGUSR1, as often as it likes."""

    def __init__(self) -> None:
        self._event = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self._event.set())

    def wait(self) -> None:
        self._event.wait()
        self._event.clear()


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    """Makes a function one that the command line can name."""
    SCENARIOS[function.__name__] = function
    return function


def main() -> None:
    """Runs the scenario that the command line names."""
    SCENARIOS[sys.argv[1]]()

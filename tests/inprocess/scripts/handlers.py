"""Rank 1 fails again and again, and a signal handler of rank 0 raises at each moment in turn."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from rank import main, say, scenario, wrapped
from rank_actions import collective, join_group, rank

import outlast
from outlast.coordination.stores.tcp_client import TcpClient
from outlast.inprocess import CallWrapper
from outlast.inprocess.interruption.monitor_thread import IterationWatch
from outlast.inprocess.interruption.release import Releaser
from outlast.inprocess.monitor.heartbeat_thread import threading as _threads
from outlast.inprocess.recovery.rank_host import RankHost

RESTARTS, STEP = map(int, sys.argv[2:4])

# In a file of the package, so that the handler finds the package's code as the interrupted one.
_SOURCE = """
def hooked(name, original):
    def call(*args, **kwargs):
        at(name, "before")
        value = original(*args, **kwargs)
        at(name, "after")
        return value
    return call

def strike():
    kill(getpid(), number)
"""
_FILE = str(Path(outlast.__file__).with_name("planned_moments.py"))


class Moments:
    """Counts what this package's main thread does in a restart; the handler's signal comes at the
    moment with the number of the restart.
    """

    def __init__(self) -> None:
        self.armed, self.count, self.struck = False, 0, 0
        self.names: dict[str, Any] = {
            "at": self._at,
            "kill": os.kill,
            "getpid": os.getpid,
            "number": signal.SIGALRM,
        }
        exec(compile(_SOURCE, _FILE, "exec"), self.names)
        for owner, name in (
            (TcpClient, "_perform"),
            (RankHost, "at"),
            (RankHost, "decided"),
            (RankHost, "assign"),
            (RankHost, "serve"),
            (Releaser, "release"),
            (IterationWatch, "wait"),
        ):
            setattr(owner, name, self.names["hooked"](name, getattr(owner, name)))

    def arm(self, number: int) -> None:
        self.armed, self.count, self.wanted = True, 0, number

    def _at(self, name: str, when: str) -> None:
        if not self.armed or _threads.current_thread() is not _threads.main_thread():
            return
        self.count += 1
        if self.count == self.wanted:
            self.struck += 1
            say("struck", at=f"{when} {name}", number=self.wanted)
            self.names["strike"]()


def _raise(*_: object) -> None:
    raise TimeoutError("a user's alarm")


@scenario
@wrapped(repeated_faults=None)
def at_each_moment(call: CallWrapper) -> int:
    """The restart of iteration k is disturbed at its moment `STEP` * k + 1."""
    if call.iteration == 0 and rank() == 0:
        signal.signal(signal.SIGALRM, _raise)
        MOMENTS.append(Moments())
    own = MOMENTS[0] if MOMENTS else None
    if own is not None:
        own.armed = False
        assert signal.getsignal(signal.SIGALRM) is _raise
    join_group()
    if call.iteration == RESTARTS:
        say(
            "moments", struck=0 if own is None else own.struck, last=0 if own is None else own.count
        )
        return collective()
    if own is not None:
        own.arm(STEP * call.iteration + 1)
    collective()  # so that rank 0 is not interrupted before that
    if rank() == 1:
        raise OSError(f"fault {call.iteration}")
    return collective()


MOMENTS: list[Moments] = []

if __name__ == "__main__":
    main()

"""Ranks and monitor processes that are killed, stopped, or hang, as the test wants."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
import threading
from typing import Any

from rank import (
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
    seconds,
    wait_forever,
)

from outlast.inprocess import Adaptive, CallWrapper, Wrapper

SHORT: dict[str, datetime.timedelta] = {
    "soft_timeout": seconds(1.5),
    "hard_timeout": seconds(2.5),
    "termination_grace_time": seconds(0.5),
    "monitor_thread_interval": seconds(0.5),
    "progress_watchdog_interval": seconds(0.5),
}


@scenario
def killed_by_the_test() -> None:
    """All tell who they are, and block in a collective for as long as nobody is killed."""

    @Wrapper(heartbeat_timeout=seconds(3))
    @observed
    def train(call: CallWrapper) -> int:
        size = join_group()
        say("ready", iteration=call.iteration, monitor=call.monitor_pid)
        if call.iteration == 0:
            wait_forever()
        assert size == collective()
        return finish()

    report(train)  # type: ignore[call-arg]


def _hang(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "gil":
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(256)
        lock(mutex)
        lock(mutex)
    elif how == "native":  # without the GIL: the watchdog's thread runs, this one does not
        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(256)
        lock(mutex)
        lock(mutex)
    else:
        wait_forever()


@scenario
def one_hangs() -> None:
    """Rank 1 hangs in the way that the command line says; the others wait for it."""
    how, pinging = sys.argv[2], sys.argv[3] == "pings"

    @Wrapper(**SHORT)
    @observed
    def train(call: CallWrapper) -> int:
        join_group()
        if call.iteration == 0:
            if rank() == 1:
                if pinging:
                    call.ping()
                _hang(how)
            collective()
        return finish()

    report(train)  # type: ignore[call-arg]


@scenario
def adaptive() -> None:
    """Steps of some milliseconds; rank 1 first declares a long phase, and then hangs."""

    limits: dict[str, Any] = {**SHORT, "hard_timeout": seconds(80)}
    limits["soft_timeout"] = Adaptive(initial=seconds(60), floor=seconds(0.3))

    @Wrapper(**limits)
    @observed
    def train(call: CallWrapper) -> int:
        pause = threading.Event()
        for step in range(40):
            call.ping()
            pause.wait(0.005)
            if step == 30 and call.iteration == 0:
                with call.long_phase(seconds(30)):
                    pause.wait(1.5)
                say("long phase over")
        if call.iteration == 0:
            if rank() == 0:
                with call.long_phase(seconds(50)):
                    wait_forever()
            call.ping()
            wait_forever()
        return rank()

    report(train)  # type: ignore[call-arg]


@scenario
def reserve() -> None:
    """Of three ranks two are active; when one of them dies, the reserve takes over."""
    from outlast.inprocess.rank_filter import MaxActiveWorldSize

    @Wrapper(rank_filter=MaxActiveWorldSize(2))
    @observed
    def train(call: CallWrapper) -> str:
        size = join_group()
        if call.iteration == 0 and len(sys.argv) > 2:
            if rank() == 1:
                die()
            collective()
        finish()
        return f"{call.state.initial_rank} of {size}"

    report(train)  # type: ignore[call-arg]


if __name__ == "__main__":
    main()

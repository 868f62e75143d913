"""Ranks and monitor processes that are killed or stopped by the test, or hang."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rank import main, say, scenario, wrapped
from rank_actions import SHORT, collective, die, finish, join_group, rank, seconds, wait_forever

from outlast.inprocess import Adaptive, CallWrapper
from outlast.inprocess.finalize import Finalize
from outlast.inprocess.monitor import loop
from outlast.inprocess.monitor.shared_page import Activity
from outlast.inprocess.rank_filter import MaxActiveWorldSize
from outlast.inprocess.running_call import running_call


@scenario
@wrapped(heartbeat_timeout=seconds(3))
def killed_by_the_test(call: CallWrapper) -> int:
    """All ranks report their ids, and wait until a rank is killed."""
    size = join_group()
    say("ready", iteration=call.iteration, monitor=call.monitor_pid)
    if call.iteration == 0:
        wait_forever()
    assert size == collective()
    return finish()


@scenario
def killed_without_effect() -> object:
    """As `killed_by_the_test`, where a monitor sees only the end of the whole process."""
    loop._STUCK_S = 1.0
    loop.open_thread = lambda tid: None
    return killed_by_the_test()


@scenario
@wrapped(**SHORT)
def one_hangs(call: CallWrapper) -> int:
    """Rank 1 hangs in the way that the command line names; the others wait for it."""
    how, pinging, long = sys.argv[2], sys.argv[3] == "pings", sys.argv[3] == "long"
    join_group()
    if call.iteration == 0:
        if rank() == 1:
            if pinging:
                call.ping()
            with call.long_phase(seconds(1000)) if long else contextlib.nullcontext():
                _hang(how)
        collective()
    return finish()


@scenario
def holds_the_gil() -> int:
    """Rank 1 is blocked in native code, and no thread of it can run Python code."""

    @wrapped(
        **SHORT,
        monitor_process_logfile=sys.argv[2] + "/monitor{rank}.log",
    )
    def train(call: CallWrapper) -> int:
        join_group()
        if call.iteration == 0:
            if rank() == 1:
                _hang("gil")
            collective()
        return finish()

    return train()


def _hang(how: str) -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "gil":
        _lock_twice(ctypes.PyDLL(None))
    elif how == "native":  # without the GIL: the watchdog's thread runs, this one does not
        _lock_twice(ctypes.CDLL(None))
    else:
        wait_forever()


def _lock_twice(library: ctypes.CDLL) -> None:
    """Waits forever, in C, for a mutex that the thread itself holds."""
    mutex = ctypes.create_string_buffer(256)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


class GilIsHeldInTheWait(Finalize):
    """A thread of rank 1 takes the GIL for ever, once the rank waits for rank 0 after the fault;
    rank 0 comes to that barrier only then.
    """

    def __call__(self, state, train_ex=None):
        held = Path(sys.argv[2])
        if state.rank == 1:
            threading.Thread(target=_hold_gil_while_waiting, args=(held,), daemon=True).start()
        else:
            while not held.exists():
                time.sleep(0.01)
        return state, train_ex


def _hold_gil_while_waiting(held: Path) -> None:
    page = running_call().page
    while page.activity != Activity.WAITING:
        time.sleep(0.001)
    held.touch()
    _lock_twice(ctypes.PyDLL(None))


@scenario
@wrapped(**SHORT | {"hard_timeout": seconds(6)}, finalize=GilIsHeldInTheWait())
def gil_held_in_the_wait(call: CallWrapper) -> int:
    """Rank 0 fails; in the recovery, rank 1 cannot run any Python code."""
    join_group()
    if call.iteration == 0:
        if rank() == 0:
            raise RuntimeError("a fault")
        collective()
    return finish()


ADAPTIVE = SHORT | {
    "soft_timeout": Adaptive(initial=seconds(60), floor=seconds(0.3)),
    "hard_timeout": seconds(80),
}


@scenario
@wrapped(**ADAPTIVE)
def adaptive(call: CallWrapper) -> int:
    """Steps of some milliseconds; rank 1 first declares a long phase, and then hangs."""
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


@scenario
@wrapped(
    **ADAPTIVE
    | {"monitor_process_interval": seconds(200), "heartbeat_timeout": seconds(300)}
    | {"barrier_timeout": seconds(400)}
)
def hangs_after_a_long_phase(call: CallWrapper) -> int:
    """Both ranks hang after a phase in which their monitor processes sleep for long."""
    pause = threading.Event()
    for _ in range(40):
        call.ping()
        pause.wait(0.005)
    with call.long_phase(seconds(300)):
        pause.wait(1.5)
    if call.iteration == 0:
        wait_forever()
    return rank()


@scenario
@wrapped(rank_filter=MaxActiveWorldSize(2))
def reserve(call: CallWrapper) -> str:
    """Two of three ranks are active; when one dies, the reserve rank takes over."""
    size = join_group()
    if call.iteration == 0 and len(sys.argv) > 2:
        if rank() == 1:
            die()
        collective()
    finish()
    return f"{call.state.initial_rank} of {size}"


if __name__ == "__main__":
    main()

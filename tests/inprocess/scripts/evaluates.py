"""A rank works for longer than the soft timeout, or does not; the others wait for it."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rank import main, scenario, wrapped
from rank_actions import SHORT, collective, finish, join_group, rank, seconds, wait_forever

from outlast.inprocess import CallWrapper

SOFT_S = 2.0
LIMITS = SHORT | {
    "soft_timeout": seconds(SOFT_S),
    "hard_timeout": seconds(2 * SOFT_S),
    "monitor_process_interval": seconds(0.5),
    "completion_timeout": seconds(SOFT_S),
    "progress_watchdog_interval": seconds(0.25),
}
LONG_S = 3.5 * SOFT_S


def _python() -> None:
    """Executes Python code."""
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        sum(range(1000))


def _compile() -> None:
    """Waits for a process that computes, as for a compiler."""
    subprocess.run([sys.executable, "-c", f"import time\nwhile time.process_time() < {LONG_S}: 0"])


def _computes(call: Callable[[int], object]) -> None:
    """One call into C that takes long."""
    began, amount = time.process_time(), 100_000
    call(amount)
    speed = amount / max(time.process_time() - began, 1e-3)
    call(int(speed * LONG_S))


WORK: dict[str, Callable[[], None]] = {
    "python": _python,
    "compile": _compile,
    "native": lambda: _computes(lambda n: hashlib.pbkdf2_hmac("sha256", b"", b"", n)),
    "gil": lambda: _computes(lambda n: sum(itertools.repeat(1, n))),
}


def _wait(how: str, call: CallWrapper) -> None:
    if how == "barrier":
        dist.barrier()
    elif how == "work":  # the innermost frame is the user's
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        work.wait()
    elif how == "store":
        call.state.store.wait(["evaluated"], seconds(100))


@scenario
@wrapped(**LIMITS)
def evaluates(call: CallWrapper) -> int:
    """Rank 0 works in the way of the first argument; the others wait in that of the second."""
    work, wait, pings = sys.argv[2:5]
    join_group()
    if pings == "pings":
        call.ping()
    if rank() != 0:
        if wait == "return":
            return call.iteration
        _wait(wait, call)
        finish()
        return call.iteration
    WORK[work]()
    if wait == "return":
        return call.iteration
    call.state.store.set("evaluated", "1")
    if wait != "store":
        _wait("barrier" if wait == "barrier" else "work", call)
    finish()
    return call.iteration


@scenario
@wrapped(**LIMITS)
def blocked_beside(call: CallWrapper) -> int:
    """Rank 0 evaluates, rank 1 waits for it, and rank 2 is blocked."""
    join_group()
    if call.iteration == 0:
        if rank() == 0:
            while True:
                sum(range(1000))
        if rank() == 2:
            call.ping()
            wait_forever() if sys.argv[2] == "lock" else time.sleep(1e6)
        collective()
    return finish()


@scenario
@wrapped(**LIMITS)
def all_wait(call: CallWrapper) -> int:
    """No rank does anything, in C code of which nothing is known."""
    join_group()
    if call.iteration == 0:
        call.state.store.wait(["never"], seconds(1000))
    return finish()


@scenario
@wrapped(**LIMITS | {"completion_timeout": seconds(1000)})
def returns_last(call: CallWrapper) -> int:
    """Rank 0 works, and returns; the others wait for what it has forgotten."""
    join_group()
    if call.iteration == 0:
        if rank() == 0:
            _python()
            return call.iteration
        call.state.store.wait(["never"], seconds(1000))
    return finish()


@scenario
@wrapped(**LIMITS, ping_timeout=seconds(2 * SOFT_S))
def endless(call: CallWrapper) -> int:
    """Rank 1 loops in Python; rank 0 waits for it."""
    join_group()
    if call.iteration == 0:
        if sys.argv[2] == "pings":
            call.ping()
        if rank() == 1:
            while True:
                sum(range(1000))
        collective()
    return finish()


if __name__ == "__main__":
    main()

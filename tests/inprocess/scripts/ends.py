"""Functions that end in special ways: in a handler, in a forked child, in an atomic block."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import sys
import threading
from typing import Any

from rank import main, report, say, scenario, wrapped
from rank_actions import SHORT, collective, die, finish, join_group, rank, seconds, wait_forever

from outlast.errors import RankExcluded, RestartAbort
from outlast.inprocess import CallWrapper, Wrapper
from outlast.inprocess.ending import Completion, Terminate
from outlast.inprocess.health_check import FaultCounter
from outlast.inprocess.initialize import RetryController
from outlast.inprocess.store import FileStore

FIRST_RANK = int(os.environ["RANK"])


@scenario
@wrapped(**SHORT | {"termination_grace_time": seconds(60)})
def exits_on_sigterm(call: CallWrapper) -> int:
    """Rank 1 hangs where no interrupt reaches it, and exits in its handler of SIGTERM."""
    join_group()
    if call.iteration == 0:
        if FIRST_RANK == 1:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            with call.atomic():
                wait_forever()
        collective()
    return finish()


@scenario
@wrapped()
def leaves(call: CallWrapper) -> int:
    """Rank 1 leaves with an exception that ends it, or the job."""
    join_group()
    if rank() == 1 and call.iteration == 0:
        raise {"abort": RestartAbort, "excluded": RankExcluded}[sys.argv[2]]("a planned end")
    return collective()


@scenario
@wrapped()
def forks(call: CallWrapper) -> int:
    """A child of rank 1 leaves the function, in the way that the command line names."""
    join_group()
    if rank() == 1 and call.iteration == 0:
        child = os.fork()
        if child == 0:
            return _leave_child(sys.argv[2])
        _, status = os.waitpid(child, 0)
        say("child", code=os.waitstatus_to_exitcode(status))
    collective()
    return finish()


def _leave_child(how: str) -> int:
    if how == "raise":
        raise ValueError("a fault of the child")
    if how == "exit":
        sys.exit(5)
    return 0


@scenario
def wraps_the_interrupt() -> None:
    """Rank 0 fails; rank 1 turns the interrupt into another exception."""

    @Wrapper()
    def train(call: CallWrapper) -> int:
        if call.iteration == 0:
            if rank() == 0:
                raise OSError("the fault")
            try:
                wait_forever()
            except BaseException as e:
                raise ValueError("the training failed") from e
        return rank()

    report(train)  # type: ignore[call-arg]


@scenario
@wrapped(**SHORT, heartbeat_timeout=seconds(2), barrier_timeout=seconds(6))
def long_atomic(call: CallWrapper) -> int:
    """Rank 0 fails while rank 1 is in an atomic block that it has declared to be very long."""
    join_group()
    if call.iteration == 0:
        if FIRST_RANK == 1:
            with call.long_phase(seconds(600)), call.atomic():
                call.state.store.set("inside", "1")  # not a collective: the fault would end it
                threading.Event().wait(30)
        call.state.store.wait(["inside"])
        raise ValueError("a planned fault")
    return finish()


@scenario
@wrapped(soft_timeout=seconds(15), hard_timeout=seconds(20))
def connects_when_the_store_is_gone(call: CallWrapper) -> int:
    """Rank 0 ends in the way that the command line names; then rank 1 begins to connect to its
    store, in C++, where no interrupt reaches it. Rank 2 waits.
    """
    if call.iteration == 0:
        if FIRST_RANK == 0:
            call.state.store.set("pid", str(os.getpid()))
            call.state.store.wait(["seen", "here"])
            if sys.argv[2] == "exit":
                sys.exit(3)
            die()
        if FIRST_RANK == 2:
            call.state.store.set("here", "1")
            wait_forever()
        served = os.pidfd_open(int(call.state.store.get("pid")))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
        try:
            call.state.store.set("seen", "1")
            select.select([served], [], [])
            join_group()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGURG])
    join_group()
    return finish()


@scenario
def on_a_file() -> None:
    """A call on a store in a file."""

    @Wrapper(store_factory=FileStore, store_kwargs={"file_name": sys.argv[2]})
    def train(call: CallWrapper) -> int:
        return rank()

    report(train)  # type: ignore[call-arg]


@scenario
def without_standard_streams() -> None:
    """A call in a daemon, which has closed them; the result goes to a file."""
    for number in range(3):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]

    @Wrapper()
    def train(call: CallWrapper) -> int:
        if call.iteration == 0:
            raise ValueError("a planned fault")
        return call.iteration

    value: Any = train()  # type: ignore[call-arg]
    with open(sys.argv[2], "w") as file:
        file.write(str(value))


@scenario
def many_calls() -> None:
    """Calls in sequence, without garbage collections."""

    @Wrapper()
    def train(call: CallWrapper) -> int:
        return rank()

    held = []
    gc.disable()
    for _ in range(12):
        train()  # type: ignore[call-arg]
        held.append(len(os.listdir("/proc/self/fd")))
    say("held", descriptors=held)


class Completes(Completion):
    def __call__(self, state):
        say("completion", rank=state.rank, iteration=state.iteration)
        raise OSError("a fault in the hook")


class Terminates(Terminate):
    def __call__(self, state):
        say("terminate", rank=state.rank, iteration=state.iteration)
        raise OSError("a fault in the hook")


@scenario
@wrapped(completion=Completes(), terminate=Terminates())
def hooks(call: CallWrapper) -> int:
    """Rank 1 leaves; rank 0 completes."""
    if call.iteration == 0:
        if rank() == 1:
            sys.exit(4)
        wait_forever()
    return rank()


@scenario
def logs() -> None:
    """Rank 1 fails once, with logging at DEBUG and a log file of the monitor."""
    logging.basicConfig(level=logging.DEBUG, format="LOG %(name)s %(levelname)s %(message)s")

    @wrapped(
        initialize=RetryController(),
        health_check=FaultCounter(),
        monitor_process_logfile=sys.argv[2] + "/monitor-{rank}.log",
    )
    def train(call: CallWrapper) -> int:
        say("monitor", pid=call.monitor_pid)
        if call.iteration == 0:
            if rank() == 1:
                call.state.store.wait(["inside"])
                raise ValueError("a planned fault")
            call.state.store.set("inside", "1")
            wait_forever()
        return rank()

    train()


@scenario
def called_again_after_an_abort() -> None:
    """Calls one after another on a fixed port. Every call but the last is aborted: by rank 0 or
    rank 1 in turn, before or after the others are in the function.
    """
    calls = 6
    for number in range(calls):

        def train(call: CallWrapper, number: int = number) -> int:
            if number == calls - 1:
                join_group()
                return finish()
            if number % 4 < 2:
                join_and_meet()
            if rank() == number % 2:
                raise RestartAbort(f"planned end of call {number}")
            wait_forever()
            return -1

        restarted = wrapped(store_kwargs={"port": int(sys.argv[2])})(train)
        with contextlib.suppress(RestartAbort):
            restarted()


def join_and_meet() -> None:
    join_group()
    collective()


if __name__ == "__main__":
    main()

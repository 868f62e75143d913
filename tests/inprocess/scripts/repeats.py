"""Faults that come back in every iteration, or that no restart can fix."""

from __future__ import annotations

import logging
import os
import sys
import time

from rank import main, say, scenario, wrapped
from rank_actions import FOREVER_S, collective, die, finish, join_group, rank, wait_forever

from outlast.async_checkpoint.storage.directory import open_storage
from outlast.coordination.training_step import report_step
from outlast.inprocess import CallWrapper, Compose, RepeatedFaults
from outlast.inprocess.initialize import RetryController


@scenario
@wrapped()
def cannot_work(call: CallWrapper) -> int:
    """Rank 1 has an error that every restart would raise again."""
    join_group()
    if rank() == 1:
        if sys.argv[2] == "name":
            call.ping()  # at the top of the loop
            undefined_name  # type: ignore[name-defined]  # noqa: B018, F821
        if sys.argv[2] == "folder":
            open_storage(__file__).prepare()
        if sys.argv[2] == "breakpoint":
            call.ping()
            call.ping()
            breakpoint()
            say("unreachable")
        if sys.argv[2] == "argument":
            call.ping()
            with call.long_phase(-1):
                pass
        import a_package_that_is_not_installed  # type: ignore[import-not-found]  # noqa: F401
    return collective()


@scenario
@wrapped()
def comes_back(call: CallWrapper) -> int:
    """Rank 1 fails in every iteration, at the same step; its message differs."""
    join_group()
    if sys.argv[2] == "pings":
        for _ in range(5):
            call.ping()
    if sys.argv[2] == "steps":  # a checkpoint of step 3: later iterations repeat fewer steps
        for step in range(3 if call.iteration else 0, 6):
            call.ping()
            report_step(step)
    if rank() == 1:
        raise ValueError(f"a planned fault at {time.monotonic()}")
    return collective()


@scenario
@wrapped(repeated_faults=RepeatedFaults(backoff=FOREVER_S, max_backoff=FOREVER_S))
def progresses(call: CallWrapper) -> int:
    """Rank 1 fails five times, each time later than before: without any pause. The command line
    says whether by a fault of its machine or by a mistake in the program.
    """
    error = KeyError if sys.argv[3] == "mistake" else OSError
    join_group()
    for step in range(call.iteration + 1):
        report_step(step + 1) if sys.argv[2] == "steps" else call.ping()
    if call.iteration < 5:
        if rank() == 1:
            raise error("a planned fault")
        collective()
    return finish()


@scenario
@wrapped()
def mistakes_on_all_ranks(call: CallWrapper) -> int:
    """The same line fails on both ranks in turn; rank 1 is replaced meanwhile."""
    if join_group() == 1:
        wait_forever()  # for the replacement
    report_step(call.iteration + 1)
    if rank() == call.iteration % 2:
        if call.iteration == 1:
            die()
        {}["lr"]  # type: ignore[index]
    return collective()


@scenario
@wrapped(initialize=Compose(RetryController(max_iterations=6)))
def is_controlled(call: CallWrapper) -> int:
    """Every rank has an error in the program, in every iteration."""
    undefined_name  # type: ignore[name-defined]  # noqa: B018, F821
    return 0


class _Pauses(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "pause" in record.getMessage():
            say("pause", message=record.getMessage())


@scenario
def left_in_the_pause() -> None:
    """Both ranks pause after the second fault, for as long as the barrier allows."""
    log = logging.getLogger("outlast.inprocess")
    log.addHandler(_Pauses())
    log.setLevel(logging.DEBUG)

    @wrapped(repeated_faults=RepeatedFaults(backoff=FOREVER_S, max_backoff=FOREVER_S))
    def train(call: CallWrapper) -> int:
        if call.iteration < 2:
            raise ValueError("a planned fault")
        return int(os.environ["WORLD_SIZE"])

    train()


if __name__ == "__main__":
    main()

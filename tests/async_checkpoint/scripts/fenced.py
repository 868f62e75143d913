"""Rank 0 of a job, on one host and then on another. Every scenario's first argument: the folder.

The environment says where the process is in its job, as the launcher and the wrapper would.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import main, raising, say, scenario

from async_checkpoint.checkpoints import NET, blank, same, state_of
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer

patch = pytest.MonkeyPatch()


@scenario
def first(path: str, plan: str, file: str = "manifest.json") -> None:
    """Commits steps 1 and 2, and is stopped while it commits step 3, by the test's plan."""
    staged = Plan(Path(plan)).use(patch)
    with Checkpointer(path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).wait(NET)
        rule = {"op": "put", "name": file} if "://" in path else {"op": "publish"}
        staged.set({**rule, "do": "wait"})
        handle = checkpointer.save(3, state_of(3))
        say("saving")
        raising(lambda: handle.wait(NET))


@scenario
def second(path: str) -> None:
    """Goes on from what it finds, to another step 3, and to step 4."""
    with Checkpointer(path) as checkpointer:
        state = blank()
        step = checkpointer.restore(state)
        say("restored", step=step, right=step is not None and same(state, state_of(step)))
        for step in (3, 4):
            checkpointer.save(step, state_of(100 + step)).wait(NET)
        say("saved")


@scenario
def third(path: str) -> None:
    """Restores the newest step, and step 3."""
    with Checkpointer(path) as checkpointer:
        for asked in (None, 3):
            state = blank()
            step = checkpointer.restore(state, step=asked)
            right = step is not None and same(state, state_of(100 + step))
            say("restored", step=step, right=right)


@scenario
def opens(path: str) -> None:
    """Opens the folder; says so, or the error."""

    def once() -> None:
        with Checkpointer(path):
            say("opened")

    raising(once)


if __name__ == "__main__":
    main()

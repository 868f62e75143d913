"""`Checkpointer` of one rank: new and replaced steps, retention with recycled files."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from outlast.async_checkpoint import Checkpointer, Retention, SaveHandle
from outlast.async_checkpoint.storage import directory as folders
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.errors import CheckpointError

from ..calls import CHANGE, CLOSE, READ, Calls
from ..failing_calls import Outcome

NET = datetime.timedelta(seconds=60)


def state_of(save: int, elements: int) -> dict[str, Any]:
    """A state of which every block depends on the number of the save."""
    generator = torch.Generator().manual_seed(save)
    return {
        "model": {
            "weight": torch.randn(elements, generator=generator),
            "bias": torch.full((7,), float(save)),
        },
        "save": save,
        "note": f"save {save}",
    }


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit by bit."""
    if isinstance(one, torch.Tensor):
        return bool(isinstance(other, torch.Tensor) and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return bool(one == other)


def check(state: dict[str, Any], elements: int) -> int:
    """The number of the save that a restored state is from.

    Raises:
        AssertionError: if not all of it is.
    """
    save = int(state["save"])
    assert same(state, state_of(save, elements)), f"a mixture, in part of save {save}"
    return save


def forget(checkpointer: Checkpointer) -> None:
    """Ends a checkpointer as a power loss would, but for the writer process, which the next one for
    the folder takes over: to start one takes most of the time of a restore.
    """
    checkpointer.abort()
    session = checkpointer.session
    session.unlock()
    for buffer in session.pool.buffers:
        buffer.snapshot = None


class CheckpointerSubject:
    """Saves `saves` times after a first save. `step_of` gives the step of a save: several may have
    the same one.
    """

    def __init__(
        self,
        name: str,
        *,
        keep: Retention | int | None = None,
        saves: int = 2,
        step_of: Callable[[int], int] = lambda save: save,
        elements: int = 4096,
        max_in_flight: int = 1,
        first: int = 1,
    ) -> None:
        self.name = name
        self._options: dict[str, Any] = {"keep": keep, "max_in_flight": max_in_flight}
        self._saves = saves
        self._step_of = step_of
        self._elements = elements
        self._first = first

    def prepare(self, folder: Path, random: Random) -> int:
        self._threads = random.choice((1, 2))
        if not self._first:
            return 0
        with Checkpointer(folder, keep=self._options["keep"], threads=1) as checkpointer:
            for save in range(1, self._first + 1):
                state = state_of(save, self._elements)
                checkpointer.save(self._step_of(save), state).wait(NET)
        return self._first

    def run(self, folder: Path, calls: Calls) -> None:
        with Checkpointer(folder, threads=self._threads, **self._options) as checkpointer:
            for save in range(self._first + 1, self._first + self._saves + 1):
                calls.note(f"begun {save}")
                state = state_of(save, self._elements)
                handle = checkpointer.save(self._step_of(save), state)
                handle.add_done_callback(partial(note_committed, calls, save))
                if self._options["max_in_flight"] == 1:
                    handle.wait(NET)

    @contextlib.contextmanager
    def restorer(self) -> Iterator[Callable[[Path, bool], int]]:
        last: list[Checkpointer] = []

        def restore(folder: Path, saves_too: bool) -> int:
            try:
                return restore_on(folder, saves_too)
            finally:
                forget(last[-1])

        def restore_on(folder: Path, saves_too: bool) -> int:
            found, step = self._restore(folder, last)
            if saves_too:
                # What it has replaced or skipped must not come back.
                again = max(step, self._step_of(found + 1) if found else 1)
                last[-1].save(again, state_of(found + 1, self._elements)).result(NET)
                forget(last[-1])
                after, _ = self._restore(folder, last)
                assert after == found + 1, f"restored save {after} after the next, {found + 1}"
            return found

        try:
            yield restore
        finally:
            if last:
                last[-1].session.close(5.0)

    def _restore(self, folder: Path, last: list[Checkpointer]) -> tuple[int, int]:
        """The save that is found, and its step."""
        last[:] = [Checkpointer(folder)]
        state: dict[str, Any] = {"model": {}, "save": 0, "note": ""}
        step = last[-1].restore(state)
        if step is None:
            return 0, 0
        found = check(state, self._elements)
        # What is visible is complete: no restore needs to skip any.
        storage = LocalStorage(str(folder))
        for visible, _ in folders.candidates(storage):
            folders.verify(storage, visible)
        return found, step


def note_committed(calls: Calls, save: int, handle: SaveHandle) -> None:
    """A callback of a handle."""
    if handle.succeeded:
        calls.note(f"committed {save}")


class FailingSave:
    """Opens a folder with a checkpoint, saves once, and closes."""

    classes = CHANGE | CLOSE

    def __init__(self, name: str, *, keep: int | None = None, replaced: bool = False) -> None:
        self.name = name
        self._keep = keep
        self._elements = 1024
        self._step = 1 if replaced else 2

    def prepare(self, folder: Path, random: Random) -> None:
        with Checkpointer(folder, threads=1) as checkpointer:
            checkpointer.save(1, state_of(1, self._elements)).wait(NET)

    def run(self, folder: Path) -> Outcome:
        error: Exception | None = None
        handle: SaveHandle | None = None
        try:
            with Checkpointer(folder, threads=1, keep=self._keep, timeout=NET) as checkpointer:
                handle = checkpointer.save(self._step, state_of(2, self._elements))
                handle.wait(NET)
        except (CheckpointError, OSError) as e:
            error = e
        if handle is not None and handle.succeeded:
            return Outcome(2, 2, error)
        assert error is not None, "the save did not succeed, and no error was raised"
        told = handle.exception(NET) if handle is not None else error
        unknown = "not known whether" in str(told)
        return Outcome(1, 2 if unknown else 1, told)

    def after(self, folder: Path, saves_too: bool) -> int:
        return restore_and_save(folder, self._elements, saves_too)


class FailingRestore:
    """Restores from a folder with two checkpoints: never the older one."""

    name = "restore"
    classes = READ | CHANGE | CLOSE

    def __init__(self) -> None:
        self._elements = 1024

    def prepare(self, folder: Path, random: Random) -> None:
        with Checkpointer(folder, threads=1) as checkpointer:
            for save in (1, 2):
                checkpointer.save(save, state_of(save, self._elements)).wait(NET)

    def run(self, folder: Path) -> Outcome:
        try:
            with Checkpointer(folder, threads=1, timeout=NET) as checkpointer:
                state: dict[str, Any] = {"model": {}, "save": 0, "note": ""}
                step = checkpointer.restore(state)
            assert step == 2, f"the restore stepped back to {step}"
            assert check(state, self._elements) == 2
        except (CheckpointError, OSError) as e:
            return Outcome(2, 2, e)
        return Outcome(2, 2)

    def after(self, folder: Path, saves_too: bool) -> int:
        return restore_and_save(folder, self._elements, saves_too)


def restore_and_save(folder: Path, elements: int, saves_too: bool) -> int:
    """The number of the save that is found; with `saves_too` the next one works, and is found."""
    with Checkpointer(folder, threads=1) as checkpointer:
        state: dict[str, Any] = {"model": {}, "save": 0, "note": ""}
        step = checkpointer.restore(state)
        found = check(state, elements) if step is not None else 0
        if saves_too:
            checkpointer.save((step or 0) + 1, state_of(found + 1, elements)).wait(NET)
    if not saves_too:
        return found
    with Checkpointer(folder, threads=1) as checkpointer:
        again: dict[str, Any] = {"model": {}, "save": 0, "note": ""}
        checkpointer.restore(again)
        assert check(again, elements) == found + 1, "the next save was not found"
    return found


_ELEMENTS = (64, 1000, 1024, 4096, 5000, 16384)  # some of whole pages, which are written directly


def new_steps(random: Random) -> CheckpointerSubject:
    """A new step each time, all of them kept."""
    return CheckpointerSubject(
        "new", elements=random.choice(_ELEMENTS), max_in_flight=random.choice((1, 2))
    )


def first_step(random: Random) -> CheckpointerSubject:
    """A folder that does not exist before."""
    return CheckpointerSubject("first", elements=random.choice(_ELEMENTS), first=0)


def replaced_step(random: Random) -> CheckpointerSubject:
    """The same step each time."""
    return CheckpointerSubject(
        "replaced",
        elements=random.choice(_ELEMENTS),
        step_of=lambda save: 7,
        keep=random.choice((None, 1)),
    )


def recycled_files(random: Random) -> CheckpointerSubject:
    """A new step each time, of which one or two are kept; sometimes a replaced one in between."""
    every = random.choice((1, 1, 2))
    return CheckpointerSubject(
        "recycled",
        elements=random.choice(_ELEMENTS),
        keep=random.choice((1, 2)),
        saves=random.choice((3, 4)),
        first=random.choice((0, 1, 3)),
        step_of=lambda save: save // every + 1,
    )

"""`outlast.elastic`: the registry of states, one state in a file of its own, and `Job`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import torch

import outlast
from outlast.elastic import State, load_all_states, save_all_states, save_state
from outlast.elastic.states import storage
from outlast.elastic.states.state import file_name

from ..calls import Calls
from .checkpointer import NET, forget

_BYTES = 9000


class Content(State):
    """Bytes of which each depends on the number of the save."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        self.number = 0

    def expected(self) -> bytes:
        head = f"{self.number:08d}".encode()
        return head + Random(f"{self.name} {self.number}").randbytes(_BYTES)

    def save(self, fileobj: BinaryIO) -> None:
        content = self.expected()
        fileobj.write(content[:5000])
        fileobj.write(content[5000:])

    def load(self, fileobj: BinaryIO) -> None:
        content = fileobj.read()
        self.number = int(content[:8])
        assert content == self.expected(), f"a mixture, in part of save {self.number}"


@contextlib.contextmanager
def saving_to(folder: Path) -> Iterator[None]:
    """Sets the folder of the registry's checkpoints."""
    before = os.environ.get("OUTLAST_CHECKPOINT_PATH")
    os.environ["OUTLAST_CHECKPOINT_PATH"] = str(folder)
    try:
        yield
    finally:
        del os.environ["OUTLAST_CHECKPOINT_PATH"]
        if before is not None:
            os.environ["OUTLAST_CHECKPOINT_PATH"] = before


class RegisteredStates:
    """`save_all_states` of two states, also in the background."""

    name = "states"

    def prepare(self, folder: Path, random: Random) -> int:
        self._states = [Content("first"), Content("second")]
        self._background = random.choice((True, False))
        self._first = random.choice((0, 1))
        with saving_to(folder / "states"):
            for number in range(1, self._first + 1):
                self._save(number)
        storage.release()
        folder.mkdir(exist_ok=True)
        return self._first

    def _save(self, number: int) -> None:
        for state in self._states:
            state.number = number
        if self._background:
            pending = save_all_states(asynchronous=True)
            assert pending is not None
            pending.wait(NET)
        else:
            save_all_states()

    def run(self, folder: Path, calls: Calls) -> None:
        with saving_to(folder / "states"):
            for number in range(self._first + 1, self._first + 4):
                calls.note(f"begun {number}")
                self._save(number)
                calls.note(f"committed {number}")
        storage.release()  # which ends the removal of older checkpoints

    @contextlib.contextmanager
    def restorer(self) -> Iterator[Callable[[Path, bool], int]]:
        def restore(folder: Path, saves_too: bool) -> int:
            with saving_to(folder / "states"):
                try:
                    found = self._load()
                    if saves_too:
                        self._save(found + 1)
                        after = self._load()
                        assert after == found + 1, f"loaded {after} after the next, {found + 1}"
                finally:
                    storage.release()
            return found

        yield restore

    def _load(self) -> int:
        for state in self._states:
            state.number = 0
        load_all_states()
        first, second = (state.number for state in self._states)
        assert first == second, f"a mixture of saves {first} and {second}"
        return first


class StateFile:
    """`save_state` of one state, into a folder that may not exist."""

    name = "state-file"

    def prepare(self, folder: Path, random: Random) -> int:
        self._state = Content("alone")
        self._first = random.choice((0, 1))
        folder.mkdir()
        for number in range(1, self._first + 1):
            self._state.number = number
            save_state(self._state, folder / "run" / "states")
        return self._first

    def run(self, folder: Path, calls: Calls) -> None:
        for number in range(self._first + 1, self._first + 3):
            calls.note(f"begun {number}")
            self._state.number = number
            save_state(self._state, folder / "run" / "states")
            calls.note(f"committed {number}")

    @contextlib.contextmanager
    def restorer(self) -> Iterator[Callable[[Path, bool], int]]:
        def restore(folder: Path, saves_too: bool) -> int:
            path = folder / "run" / "states" / file_name(self._state.name)
            self._state.number = 0
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                self._state.load(file)
            return self._state.number

        yield restore


class JobSubject:
    """A `Job` that saves every second step, and keeps two checkpoints. A save is a step."""

    name = "job"

    def prepare(self, folder: Path, random: Random) -> int:
        self._first = random.choice((0, 2))
        self._steps = 4
        self._keep = random.choice((1, 2, None))
        self._expected = self._trained(self._first + self._steps)
        if self._first:
            self._train(folder, self._first, None)
        return self._first

    def _parts(self) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}

    def _step(self, parts: dict[str, Any]) -> None:
        parts["optimizer"].zero_grad()
        parts["model"](torch.randn(8, 40)).square().mean().backward()
        parts["optimizer"].step()

    def _trained(self, steps: int) -> list[bytes]:
        """The parameters after each number of steps; the random generator is part of the state."""
        parts = self._parts()
        found = [_bits(parts["model"])]
        for _ in range(steps):
            self._step(parts)
            found.append(_bits(parts["model"]))
        return found

    def _train(self, folder: Path, until: int, calls: Calls | None) -> None:
        parts = self._parts()
        with outlast.Job(folder, **parts, every=None, keep=self._keep, signals=()) as job:
            job.restore()
            while job.steps < until:
                self._step(parts)
                job.step()
                if calls is not None:
                    calls.note(f"begun {job.steps}")
                job.save().wait(NET)
                if calls is not None:
                    calls.note(f"committed {job.steps}")

    def run(self, folder: Path, calls: Calls) -> None:
        self._train(folder, self._first + self._steps, calls)

    @contextlib.contextmanager
    def restorer(self) -> Iterator[Callable[[Path, bool], int]]:
        last: list[outlast.Job] = []

        def restore(folder: Path, saves_too: bool) -> int:
            parts = self._parts()
            last[:] = [outlast.Job(folder, **parts, every=None, signals=())]
            try:
                steps = last[0].restore()
                assert _bits(parts["model"]) == self._expected[steps], f"not the state of {steps}"
                if steps + 1 < len(self._expected):  # the optimizer and the generator too
                    self._step(parts)
                    assert _bits(parts["model"]) == self._expected[steps + 1], "trains differently"
            finally:
                forget(last[0].checkpointer)
            return steps

        try:
            yield restore
        finally:
            if last:
                last[0].checkpointer.session.close(5.0)


def _bits(model: torch.nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())

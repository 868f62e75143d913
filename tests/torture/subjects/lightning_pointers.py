"""The checkpoints of Lightning's `ModelCheckpoint`, written by `CheckpointFolder`.

It is driven as `BackgroundCheckpointIO` does: `save_top_k=1` with the file of each epoch,
`save_last` with one file that is replaced. Lightning itself is not needed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import outlast.integrations

from ..calls import Calls
from .checkpointer import NET, check, forget, note_committed, state_of

_ELEMENTS = 1024


def _module() -> ModuleType:
    """`checkpoint_folder`, without its package, which imports Lightning."""
    (folder,) = outlast.integrations.__path__
    path = Path(folder) / "lightning" / "checkpoint_folder.py"
    spec = importlib.util.spec_from_file_location("outlast_lightning_checkpoint_folder", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LightningPointers:
    """`how` is "epochs", one file for each save, of which the one before is removed, or "last"."""

    def __init__(self, how: str) -> None:
        self.name = f"lightning-{how}"
        self._how = how
        self._folder = _module().CheckpointFolder

    def prepare(self, folder: Path, random: Random) -> int:
        self._waits = random.choice((True, False))
        opened = self._folder(folder / "version_0" / "checkpoints", {"threads": 1})
        last = random.choice((0, 1))
        for save in range(1, last + 1):
            self._save(opened, folder, save, None)
        opened.close(None)
        if not last:
            shutil.rmtree(folder)
        return last

    def run(self, folder: Path, calls: Calls) -> None:
        first = 2 if folder.exists() else 1
        opened = self._folder(folder / "version_0" / "checkpoints", {"threads": 1})
        for save in range(first, first + 3):
            calls.note(f"begun {save}")
            self._save(opened, folder, save, calls)
            if self._waits:
                opened._last.wait(NET)
        opened.close(None)

    def _path(self, folder: Path, save: int) -> Path:
        name = "last" if self._how == "last" else f"epoch={save}"
        return folder / "version_0" / "checkpoints" / f"{name}.ckpt"

    def _save(self, opened: Any, folder: Path, save: int, calls: Calls | None) -> None:
        opened.save({"state": state_of(save, _ELEMENTS)}, self._path(folder, save))
        if calls is not None:
            opened._last.add_done_callback(partial(note_committed, calls, save))
        if self._how == "epochs" and save > 1:
            opened.remove(self._path(folder, save - 1))

    @contextlib.contextmanager
    def restorer(self) -> Iterator[Callable[[Path, bool], int]]:
        last: list[Any] = []

        def restore(folder: Path, saves_too: bool) -> int:
            try:
                found = self._restore(folder, last)
                if saves_too:
                    pointed = threading.Event()
                    self._save(last[-1], folder, found + 1, None)
                    last[-1]._last.add_done_callback(lambda _: pointed.set())  # after the pointer's
                    assert pointed.wait(NET.total_seconds())
                    forget(last[-1]._checkpointer)
                    after = self._restore(folder, last)
                    assert after == found + 1, f"loaded save {after} after the next, {found + 1}"
                return found
            finally:
                if last:
                    forget(last[-1]._checkpointer)

        try:
            yield restore
        finally:
            if last:
                last[-1]._checkpointer.session.close(5.0)

    def _restore(self, folder: Path, last: list[Any]) -> int:
        """Loads every file that is there: each leads to a whole checkpoint."""
        there = folder / "version_0" / "checkpoints"
        last[:] = [self._folder(there, {"threads": 1})]
        found = [0]
        for path in there.glob("*.ckpt"):
            loaded = last[-1].load(path, weights_only=True)
            found.append(check(loaded["state"], _ELEMENTS))
            # A file of its own epoch is not one of another; two may be there after a power loss.
            assert self._path(folder, found[-1]) == path
        return max(found)

"""Fixtures of the elastic tests: a clean environment, and a checkpoint folder."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OUTLAST_", "ADAPTDL_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _released_states() -> Iterator[None]:
    """Ends the checkpointer of states, which otherwise ends with the program."""
    yield
    storage = sys.modules.get("outlast.elastic.states.storage")
    if storage is not None:
        storage.release()


@pytest.fixture(autouse=True)
def _signal_handler() -> Iterator[None]:
    """torch installs one for SIGCHLD with the first worker process, and leaves it."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint folder, set in the environment."""
    path = tmp_path / "checkpoints"
    monkeypatch.setenv("OUTLAST_CHECKPOINT_PATH", str(path))
    return path

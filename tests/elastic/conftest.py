"""Fixtures of the elastic tests: a clean environment, and a checkpoint folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OUTLAST_", "ADAPTDL_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint folder, set in the environment."""
    path = tmp_path / "checkpoints"
    monkeypatch.setenv("OUTLAST_CHECKPOINT_PATH", str(path))
    return path

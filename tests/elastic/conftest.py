"""What the tests of elastic state share: an environment that says nothing, and rank processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from procs import Job
from zygote import Zygote

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OUTLAST_", "ADAPTDL_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of checkpoints, as the environment names it."""
    path = tmp_path / "checkpoints"
    monkeypatch.setenv("OUTLAST_CHECKPOINT_PATH", str(path))
    return path


@pytest.fixture(autouse=True, scope="session")
def zygote() -> Iterator[Zygote]:
    # For all tests, so that it does not seem to be left behind by the first that uses it.
    with Zygote() as zygote:
        yield zygote


@pytest.fixture
def ranks(tmp_path: Path, zygote: Zygote) -> Callable[..., Job]:
    """`ranks("script", "scenario", nprocs=2)`: a job of a scenario of `scripts/script.py`."""

    def job(script: str, *args: str, nprocs: int = 2, **kwargs: Any) -> Job:
        path = SCRIPTS / f"{script}.py"
        return Job(tmp_path, path, nprocs=nprocs, args=args, spawn=zygote.spawn, **kwargs)

    return job

"""Fixtures of the tests of the device `late`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Run, ranks_of, run
from late import device


@pytest.fixture(scope="module", autouse=True)
def extension() -> None:
    """In other processes only: a process that has the device would use it in other tests too."""
    try:
        device.built()
    except device.NoCompilerError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> Callable[..., Run]:
    """The run of a plan without faults, which is made once."""
    script = Path(__file__).parent / "scripts" / "live.py"
    made: dict[str, Run] = {}

    def undisturbed(nprocs: int = 2, **plan: Any) -> Run:
        name = repr((nprocs, plan))
        if name not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            ranks = ranks_of(folder, script, zygote)
            made[name] = run(ranks, folder / "checkpoints", nprocs=nprocs, **plan)
        return made[name]

    return undisturbed

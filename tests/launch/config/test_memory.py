"""The default number of standby processes follows the memory of the host or the container."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.launch.config import from_options as memory
from outlast.launch.config.from_options import job_from_options
from outlast.launch.config.options import RunOptions


def cgroup(folder: Path, limit: str, used: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    return folder


def test_the_limit_of_the_container_counts(tmp_path: Path) -> None:
    spare = 2 * memory.STANDBY_BYTES
    assert memory.available_bytes(cgroup(tmp_path, str(spare), spare + 1)) == 0
    assert memory.default_standbys(cgroup(tmp_path, str(2 * spare), spare + 1)) == 0
    without = memory.available_bytes(cgroup(tmp_path, "max", 0))
    assert without > 0
    assert memory.available_bytes(tmp_path / "none") > 0


def test_the_default_is_one_if_it_can_be_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast.launch.config.from_options.default_standbys", lambda: 1)
    assert job_from_options(RunOptions(script=__file__, nproc_per_node="2")).standby == 1
    assert job_from_options(RunOptions(script=__file__)).standby == 0  # it is never replaced
    assert job_from_options(RunOptions(script=__file__, standby=3)).standby == 3
    program = RunOptions(script="echo", no_python=True, nproc_per_node="2")
    assert job_from_options(program).standby == 0


def test_a_program_that_is_not_python_has_no_standbys() -> None:
    with pytest.raises(ValueError, match="--standby and --no-python cannot be combined"):
        job_from_options(RunOptions(script="echo", no_python=True, standby=1))

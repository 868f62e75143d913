"""The default number of standby processes follows the memory of the host or the container."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.launch.config import from_options
from outlast.launch.config.from_options import job_from_options
from outlast.launch.config.options import RunOptions
from outlast.system.shared_memory import available_bytes


def cgroup(folder: Path, limit: str, used: int, cached: int = 0) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_anon 7\ninactive_file {cached}\n")
    return folder


def test_the_limit_of_the_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = 2 * from_options.STANDBY_BYTES
    assert available_bytes(cgroup(tmp_path, str(spare), spare + 1)) == 0
    assert available_bytes(cgroup(tmp_path, str(spare), spare, 4096)) == 4096
    container = cgroup(tmp_path, str(2 * spare), spare)
    monkeypatch.setattr(from_options, "available_bytes", lambda: available_bytes(container))
    assert from_options.default_standbys() == 0
    without = available_bytes(cgroup(tmp_path, "max", 0))
    assert without > 0
    assert available_bytes(tmp_path / "none") > 0


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

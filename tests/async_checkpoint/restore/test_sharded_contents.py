"""What ranks saved in parts, exported and compared without ranks: `outlast checkpoint`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from async_checkpoint.checkpoints import same
from launch.checkpoint_command import outlast
from outlast.chaos.storage import flip_byte
from procs import Job

Ranks = Callable[..., Job]
SIZES = (1, 2, 4)


def saved(ranks: Ranks, path: Path, nprocs: int) -> Path:
    """FSDP2's state and DTensors of several placements, the same at any number of ranks."""
    path.mkdir()
    with ranks("sharded", "saves", str(path), nprocs=nprocs) as job:
        job.start_all()
        codes = job.wait_all()
        assert set(codes.values()) == {0}, "\n".join(map(job.errors, range(nprocs)))
    return path


def without_empty(state: Any) -> Any:
    """The state without empty dicts, which a checkpoint does not have."""
    if isinstance(state, Mapping):
        inner = {key: without_empty(value) for key, value in state.items()}
        return {key: value for key, value in inner.items() if value != {}}
    return state


@pytest.mark.slow
def test_the_number_of_ranks_makes_no_difference(ranks: Ranks, tmp_path: Path) -> None:
    folders = [saved(ranks, tmp_path / str(size), size) for size in SIZES]
    files = []
    for folder in folders:
        done = outlast("export", folder, "-o", folder / "x.pt")
        assert (done.exit_code, done.stderr) == (0, "")
        expected = torch.load(folder / "expected", weights_only=False)
        found = torch.load(folder / "x.pt", weights_only=True)
        assert same(found, without_empty(expected))
        assert found["dtensors"]["columns"].shape == (4, 9)
        assert outlast("export", folder, "-o", folder / "x.safetensors").exit_code == 0
        files.append((folder / "x.safetensors").read_bytes())
        done = outlast("diff", folders[0], folder)
        assert done.exit_code == 0, done.output
    assert files[0] == files[1] == files[2]


@pytest.mark.fsdp2
def test_a_damaged_part_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    folder = saved(ranks, tmp_path / "c", 2)
    file = folder / "x.safetensors"
    assert outlast("export", folder, "-o", file, "dtensors.rows").exit_code == 0
    whole = file.read_bytes()
    manifest = json.loads((folder / "step-00000001" / "manifest.json").read_bytes().split(b"\n")[1])
    parts = manifest["tensors"]["dtensors.rows"]["shards"]
    assert [part["offsets"] for part in parts] == [[0, 0], [4, 0]]
    flip_byte(folder / "step-00000001" / parts[1]["file"], parts[1]["at"])
    done = outlast("export", folder, "-o", file, "--force", "dtensors.rows")
    assert done.exit_code == 1
    assert parts[1]["file"] in done.stderr
    assert file.read_bytes() == whole

"""Saves in the background with torch.distributed.checkpoint, by the functions of 0.4."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from procs import Job


@pytest.mark.slow  # imports torch.distributed.checkpoint in each rank
def test_a_save_in_the_background_is_loaded_by_plain_pytorch(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    with ranks("dcp_saves", "saves", str(tmp_path)) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, job.errors(0) + job.errors(1)
    for rank in (0, 1):
        values, error, complete, hidden = json.loads(job.output(rank).splitlines()[-1])
        assert values == [[1.0] * 3, [1.0 + rank] * 2, 7]
        assert "failed on rank 1" in error
        assert "FileNotFoundError" in error
        assert (complete, hidden) == ([True, False], [])

"""A program for AdaptDL's checkpoints runs with its imports changed, in AdaptDL's environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.states.test_saving import names_in
from procs import Job


@pytest.mark.slow
def test_a_program_for_adaptdl(
    ranks: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adaptdl"
    sizes = [2, 1, 3, 2]
    for restarts, size in enumerate(sizes):
        env = {
            "ADAPTDL_CHECKPOINT_PATH": str(folder),
            "ADAPTDL_NUM_REPLICAS": str(size),
            "ADAPTDL_NUM_RESTARTS": str(restarts),
            "OWN_FOLDER": str(tmp_path / "own"),
            # AdaptDL's scheduler does not set the torch launcher's variables.
            "RANK": "",
            "WORLD_SIZE": "",
        }
        with ranks("adaptdl_program", nprocs=size, env=env) as job:
            for rank in range(size):
                # Without a process group rank 0 does not wait for the others, so it runs last here.
                job.start(size - 1 - rank, {"ADAPTDL_REPLICA_RANK": str(size - 1 - rank)})
                job.wait(size - 1 - rank)
            codes = set(job.wait_all().values())
            assert codes == ({143} if restarts < 3 else {0}), job.errors(0)
            if restarts == 3:
                # A state without `save` and `load` is saved as an empty one.
                assert job.output(0) == "done 10 [2, 1, 3, 2]\n"
    assert len(names_in(folder)) == 1
    assert os.listdir(tmp_path / "own") == ["progress.state"]

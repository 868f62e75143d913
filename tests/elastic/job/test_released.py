"""What an iteration used is released at the restart, not when Python next collects cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import outlast
from outlast.async_checkpoint.snapshot.snapshot import Snapshotter
from procs import Job


def test_a_save_that_is_interrupted_in_its_snapshot_does_not_keep_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    gc.collect()
    gc.disable()
    try:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        job = outlast.Job(tmp_path / "c", model=model, optimizer=optimizer, signals=())
        job.restore()
        with monkeypatch.context() as patch:
            patch.setattr(Snapshotter, "take", interrupted)
            with pytest.raises(KeyboardInterrupt) as raised:
                job.save()
        job.close()
        held = weakref.ref(model)
        del model, optimizer, job, raised
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_restarts_leave_no_reference_cycles(ranks: Callable[..., Job], tmp_path: Path) -> None:
    with ranks("released", str(tmp_path / "c")) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, job.errors(0) + job.errors(1)
        for rank in (0, 1):
            (line,) = [line for line in job.lines(rank) if line.get("event") == "released"]
            assert line["models"] <= 1  # from which the next iteration continues
            assert line["after"] <= line["before"] + 4

"""A data loader whose persistent workers have died, or did not begin an epoch, is usable again."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic.small_jobs import job


def loader_of(size: int) -> DataLoader[torch.Tensor]:
    data = TensorDataset(torch.arange(size, dtype=torch.float32).reshape(size, 1))
    return DataLoader(data, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]


def kill_worker(loader: DataLoader[torch.Tensor]) -> None:
    worker = loader._iterator._workers[0]  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def test_a_worker_that_has_died_is_replaced_at_the_next_epoch(tmp_path: Path) -> None:
    loader, seen = loader_of(3), list[list[float]]()
    with job(tmp_path) as made:
        for _ in made.epochs(2):
            seen.append([])
            for (x,) in made.batches(loader):
                seen[-1].append(float(x))
                made.step()
            if len(seen) == 1:
                # torch's handler of SIGCHLD, if it is still there, raises wherever this thread is.
                with contextlib.suppress(RuntimeError):
                    kill_worker(loader)
    assert seen == [[0.0, 1.0, 2.0]] * 2


def test_an_epoch_whose_beginning_failed_leaves_no_broken_iterator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, seen = loader_of(2), list[float]()
    with job(tmp_path) as made:
        for epoch in made.epochs(2):
            if epoch == 1:
                kept = type(loader._iterator)
                with monkeypatch.context() as patch:
                    patch.setattr(kept, "_next_data", lambda self: exec("raise KeyError('x')"))
                    with pytest.raises(KeyError):
                        next(iter(made.batches(loader)))
                assert loader._iterator is None
            for (x,) in made.batches(loader):
                seen.append(float(x))
                made.step()
    assert seen == [0.0, 1.0] * 2

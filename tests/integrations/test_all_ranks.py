"""On CPUs, accelerate takes no notice of other ranks unless it is told to: an error says so."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from outlast.integrations.common import check_all_ranks


def group_of(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)


def test_ranks_that_would_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group_of(2, monkeypatch)
    with pytest.raises(ValueError, match=r"uses 1 of 2 ranks.*Accelerator\(cpu=True\)"):
        check_all_ranks(1, "Accelerator(cpu=True)")


def test_all_ranks_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    check_all_ranks(1, "")  # without a process group
    group_of(2, monkeypatch)
    check_all_ranks(2, "")

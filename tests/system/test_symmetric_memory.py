"""A use of torch's symmetric memory is noted, however it begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from outlast.system import symmetric_memory


def allocate(owner: Any) -> None:
    with pytest.raises(RuntimeError):  # no device of this machine has any
        owner.empty_strided_p2p((1,), (1,), torch.float32, torch.device("cpu"))


def register(owner: Any) -> None:
    owner.set_group_info("noted", 0, 1, dist.HashStore())


@pytest.mark.parametrize("use", [allocate, register])
def test_a_use_is_noted(monkeypatch: pytest.MonkeyPatch, use: Any) -> None:
    from torch._C._distributed_c10d import _SymmetricMemory as owner

    monkeypatch.setattr(symmetric_memory, "_used", False)
    before = dict(vars(owner))
    with symmetric_memory.noted():
        assert not symmetric_memory.is_used()
        use(owner)
    assert symmetric_memory.is_used()
    assert dict(vars(owner)) == before

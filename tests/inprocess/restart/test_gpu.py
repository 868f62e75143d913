"""With a GPU: an NCCL group is aborted and created again; the health check runs on the device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from outlast.inprocess import CallWrapper, Wrapper
from outlast.inprocess.health_check import CudaHealthCheck

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_an_nccl_group_comes_up_again_after_a_restart() -> None:
    @Wrapper(health_check=CudaHealthCheck())
    def train(call: CallWrapper) -> tuple[int, float]:
        dist.init_process_group("nccl")
        numbers = torch.ones(1024, device="cuda")
        dist.all_reduce(numbers)
        if call.iteration < 3:
            raise RuntimeError(f"planned, in iteration {call.iteration}")
        total = float(numbers.sum())
        dist.destroy_process_group()
        return call.iteration, total

    assert train() == (3, 1024.0)

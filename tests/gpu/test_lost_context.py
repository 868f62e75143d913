"""An error inside a kernel makes the CUDA context of its process unusable: the process must be
replaced. CUDA is a stand-in here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.runs import Run
from outlast.errors import HealthCheckError
from outlast.inprocess.health_check import check_device_context

ERROR = "CUDA error: device-side assert triggered"

SCRIPT = """
import os
import torch
import torch.distributed as dist
from outlast.inprocess import Wrapper

ERROR = "CUDA error: device-side assert triggered"


class Stream:
    def query(self):
        raise RuntimeError(ERROR)


@Wrapper()
def train():
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1" and os.environ["OUTLAST_REPLACEMENT"] == "0":
        torch.accelerator.current_accelerator = lambda: torch.device("cuda")
        torch.accelerator.current_device_index = lambda: 0
        torch.accelerator.device_count = lambda: 1
        torch.cuda.is_initialized = lambda: True
        torch.cuda.memory_reserved = lambda device: 1
        torch.cuda.default_stream = lambda device: Stream()
        raise RuntimeError(ERROR)
    dist.barrier()
    dist.destroy_process_group()
    print("trained", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)


train()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("zygote")
def test_a_rank_whose_context_is_lost_is_replaced(tmp_path: Path) -> None:
    with Run(tmp_path, SCRIPT, "--nproc-per-node=2") as run:
        assert run.wait() == 0, run.err
    assert any("replacement 1 of 3" in line for line in run.words), run.err
    assert "cannot be used after an error on cuda:0" in run.err
    assert run.out.count("trained 1") == 2


class Stream:
    def __init__(self, outcome: bool | Exception) -> None:
        self.outcome = outcome

    def query(self) -> bool:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def with_streams(monkeypatch: pytest.MonkeyPatch, outcomes: list[bool | Exception]) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(outcomes))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream(outcomes[device]))


def test_work_in_progress_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_streams(monkeypatch, [True, False])
    check_device_context(0)


def test_the_error_names_rank_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with_streams(monkeypatch, [True, RuntimeError(f"{ERROR}\nCompile with TORCH_USE_CUDA_DSA")])
    with pytest.raises(HealthCheckError, match=rf"^rank 3: .* on cuda:1, .*: {ERROR}$"):
        check_device_context(3)


def test_a_process_that_has_not_used_cuda_is_not_checked() -> None:
    check_device_context(0)
    assert not torch.cuda.is_initialized()

"""What needs several GPUs on one host: NVLink between them, and jobs of other sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu import first_day

COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(100),
    pytest.mark.usefixtures("zygote"),
    pytest.mark.skipif(COUNT < 2, reason="needs several GPUs"),
]


@pytest.mark.parametrize("nvls", ["0", "1"])
def test_a_kill_with_nvlink_sharp_or_without(tmp_path: Path, nvls: str) -> None:
    if nvls == "1" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs GPUs with NVLink SHARP: compute capability 9.0 or more")
    env = {"NCCL_NVLS_ENABLE": "2" if nvls == "1" else "0"}
    first_day.run(tmp_path, "in_a_collective", "kill", ranks=COUNT, replaced=1, env=env)


@pytest.mark.parametrize("scenario", ["between_pairs", "in_a_subgroup", "in_a_split", "sharded"])
def test_all_gpus(tmp_path: Path, scenario: str) -> None:
    first_day.run(tmp_path, scenario, ranks=COUNT)


def test_symmetric_memory(tmp_path: Path) -> None:
    if not all(torch.cuda.can_device_access_peer(0, each) for each in range(1, COUNT)):
        pytest.skip("needs GPUs that reach each other's memory")
    first_day.run(tmp_path, "in_symmetric_memory", "raise", ranks=COUNT)


def test_a_job_that_comes_back_with_one_rank_less_and_with_all(tmp_path: Path) -> None:
    first_day.resize(tmp_path, COUNT, COUNT - 1, COUNT)

"""NCCL groups of one rank are created again; a hung or lost GPU is found."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from inprocess.view_strategies import state_of
from launch.runs import Run
from outlast.errors import RankTimeout
from outlast.inprocess import CallWrapper, Wrapper
from outlast.inprocess.health_check import CudaHealthCheck

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("default"),
]
STATE = state_of(0, 1)

# A kernel that does not end: only the end of the process frees the GPU.
HANGS = """
import os
from datetime import timedelta
import torch
from outlast.inprocess import CallWrapper, Wrapper

@Wrapper(soft_timeout=timedelta(seconds=5), hard_timeout=timedelta(seconds=10))
def train(call: CallWrapper):
    call.ping()
    ones = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    call.ping()
    if os.environ["OUTLAST_REPLACEMENT"] == "0":
        torch.cuda._sleep(1 << 40)
    print("sum", ones.sum().item(), flush=True)

train()
"""

# A device-side assertion. The process cannot use CUDA any more, and is replaced.
ASSERTS = """
import os
import torch
from outlast.inprocess import CallWrapper, Wrapper

@Wrapper()
def train(call: CallWrapper):
    table = torch.ones(4, device="cuda")
    if os.environ["OUTLAST_REPLACEMENT"] == "0":
        table[torch.tensor([9], device="cuda")]
        torch.cuda.synchronize()
    print("sum", table.sum().item(), flush=True)

train()
"""

CHECK_AFTER_AN_ASSERTION = """
import torch
from outlast.inprocess.state import State
from outlast.inprocess.health_check import CudaHealthCheck, check_device_context
table = torch.ones(4, device="cuda")
state = State(0, 1, 0, 1)
CudaHealthCheck()(state)
check_device_context(0)
table[torch.tensor([9], device="cuda")]
for check in (lambda: CudaHealthCheck()(state), lambda: check_device_context(0)):
    try:
        check()
    except Exception as e:
        print(type(e).__name__, str(e).partition("\\n")[0])
"""


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


def test_a_group_with_queued_collectives_is_aborted() -> None:
    """One rank: its collectives are behind a kernel that takes a second."""

    @Wrapper()
    def train(call: CallWrapper) -> int:
        dist.init_process_group("nccl")
        numbers = torch.ones(1 << 20, device="cuda")
        dist.all_reduce(numbers)
        if call.iteration == 0:
            torch.cuda._sleep(1 << 30)
            for _ in range(100):
                dist.all_reduce(numbers)
            raise RuntimeError("planned")
        torch.cuda.synchronize()
        dist.destroy_process_group()
        return call.iteration

    assert train() == 1


@pytest.mark.usefixtures("zygote")
def test_a_hang_inside_a_kernel_ends_the_process_which_is_replaced(tmp_path: Path) -> None:
    with Run(tmp_path, HANGS) as run:
        assert run.wait() == 0, run.err
    assert "sum 4.0" in run.out
    assert "replacement 1 of" in run.err


@pytest.mark.usefixtures("zygote")
def test_a_fault_inside_a_kernel_replaces_the_process(tmp_path: Path) -> None:
    with Run(tmp_path, ASSERTS) as run:
        assert run.wait() == 0, run.err
    assert "sum 4.0" in run.out
    assert "cannot be used after an error on cuda:0" in run.err
    assert "replacement 1 of" in run.err


def test_the_health_checks_after_a_device_side_assertion() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK_AFTER_AN_ASSERTION],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert "device-side assert" in lines[0]
    assert lines[1].startswith("HealthCheckError rank 0: the CUDA context of this process cannot")


def test_a_gpu_answers_or_is_found_busy() -> None:
    device = torch.cuda.current_device()
    torch.ones(8, device=device)
    CudaHealthCheck()(STATE)
    torch.cuda._sleep(10_000_000_000)
    with pytest.raises(RankTimeout, match=f"cuda:{device}"):
        CudaHealthCheck(timedelta(seconds=0.2))(STATE)
    torch.cuda.synchronize()
    CudaHealthCheck()(STATE)

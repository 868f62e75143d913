"""What users of NCCL meet first, with two ranks, or one: on one GPU, where each rank seems to NCCL
to be on a host of its own. `benchmarks/gpu/plan.py` has the order. What takes another way between
the GPUs of one host is in `test_several.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu import first_day

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(75), pytest.mark.usefixtures("zygote")]
NOT_BLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10"}


@pytest.mark.parametrize("how", ["raise", "finally"])
def test_an_exception_in_a_collective(tmp_path: Path, how: str) -> None:
    first_day.run(tmp_path, "in_a_collective", how)


def test_a_kill_in_a_collective(tmp_path: Path) -> None:
    first_day.run(tmp_path, "in_a_collective", "kill", replaced=1)


@pytest.mark.parametrize("env", [{}, NOT_BLOCKING], ids=["blocking", "not-blocking"])
@pytest.mark.parametrize("how", ["lazy", "eager"])
def test_an_exception_before_the_first_collective(
    tmp_path: Path, how: str, env: dict[str, str]
) -> None:
    first_day.run(tmp_path, "before_the_first_collective", how, env=env)


def test_a_kill_with_workers_of_a_loader_on_a_full_gpu(tmp_path: Path) -> None:
    first_day.run(tmp_path, "with_workers", ranks=1, replaced=1)


def test_no_context_is_left_on_the_first_gpu(tmp_path: Path) -> None:
    out = first_day.run(tmp_path, "saves", str(tmp_path / "checkpoints"))
    found, ranks = map(int, out.split("contexts ")[1].split()[:2])
    if not found:
        pytest.skip("nvidia-smi shows no processes here, as in some containers")
    assert found <= ranks, "more processes than ranks have a context on GPU 0"


@pytest.mark.fsdp2
def test_a_sharded_model(tmp_path: Path) -> None:
    first_day.run(tmp_path, "sharded")


def test_a_captured_collective(tmp_path: Path) -> None:
    first_day.run(tmp_path, "in_a_graph")


@pytest.mark.parametrize("scenario", ["in_a_subgroup", "in_a_split", "between_pairs"])
def test_other_groups(tmp_path: Path, scenario: str) -> None:
    first_day.run(tmp_path, scenario)


@pytest.mark.parametrize("name", ["TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_DESYNC_DEBUG"])
def test_variables_for_debugging(tmp_path: Path, name: str) -> None:
    value = "DETAIL" if name == "TORCH_DISTRIBUTED_DEBUG" else "1"
    first_day.run(tmp_path, "in_a_collective", "raise", env={name: value})


@pytest.mark.timeout(150)
def test_two_hundred_aborts_leave_nothing_behind(tmp_path: Path) -> None:
    out = first_day.run(tmp_path, "many_aborts", "200", ranks=1)
    assert "grown []" in out

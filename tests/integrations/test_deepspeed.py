"""DeepSpeed's engine with `outlast.integrations.deepspeed`, on real ranks, through faults."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from integrations.faulty_runs import losses_of
from launch.runs import Run
from outlast.integrations.common import pack, unpack
from zygote import Zygote

SCRIPT = Path(__file__).parent / "scripts" / "deepspeed_training.py"
RESIZED = SCRIPT.with_name("deepspeed_resized.py")
STEPS = 24
# Steps count from the start of an iteration.
FAULTS = [
    {"rank": 1, "iteration": 0, "step": 5, "kind": "exception"},
    {"rank": 1, "iteration": 1, "step": 5, "kind": "sigkill"},
    {"rank": 0, "iteration": 2, "step": 5, "kind": "sigkill"},
]
INSTALLED = importlib.util.find_spec("deepspeed")


@pytest.mark.skipif(not INSTALLED, reason="needs the extra `deepspeed`: make test-ports")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_zero_survives_faults_bit_by_bit(tmp_path: Path, stage: int, zygote: Zygote) -> None:
    expected = losses_of(tmp_path / "undisturbed", SCRIPT, [str(stage), "saved"], nprocs=2)
    # The last line of each rank is the hash of the final weights.
    assert set(expected) == {(rank, step) for rank in (0, 1) for step in range(1, STEPS + 2)}
    arguments = [str(stage), "saved"]
    found = losses_of(tmp_path / "disturbed", SCRIPT, arguments, nprocs=2, faults=FAULTS, stop_at=5)
    assert found == expected


def _run(folder: Path, stage: int, steps: int, nprocs: int, code: int, **environment: str) -> Run:
    options = [RESIZED.read_text(), f"--nproc-per-node={nprocs}"]
    folder.mkdir(exist_ok=True)
    with Run(folder, *options, args=[str(stage), str(steps)], env=environment) as run:
        assert run.wait() == code, run.err[-10_000:]
    return run


def _train(folder: Path, stage: int, steps: int, nprocs: int, **environment: str) -> list[float]:
    """The weights of rank 0 after so many steps, from the newest checkpoint in the folder."""
    run = _run(folder, stage, steps, nprocs, 0, **environment)
    (line,) = re.findall(r"^\[0\] steps (.*), weights \[(.*)\]$", run.out, re.MULTILINE)
    assert line[0] == f"{steps}, state {{'told': {steps}}}"
    return [float(each) for each in line[1].split(", ")]


@pytest.mark.skipif(not INSTALLED, reason="needs the extra `deepspeed`: make test-ports")
@pytest.mark.slow
def test_without_zero_any_number_of_ranks_continues(tmp_path: Path, zygote: Zygote) -> None:
    """Also with the client state that `restore` has returned, saved again: by the program, or for a
    stop that was requested before a restart in place.
    """
    expected = _train(tmp_path / "undisturbed", 0, 12, 2)
    _train(tmp_path / "resumed", 0, 3, 2)
    stopped = _run(tmp_path / "resumed", 0, 6, 2, 143, STOPPED="3")
    assert "stopping after step 3: " in stopped.err
    _train(tmp_path / "resumed", 0, 6, 2)
    _train(tmp_path / "resumed", 0, 9, 1)
    assert _train(tmp_path / "resumed", 0, 12, 3) == pytest.approx(expected, abs=1e-4)


@pytest.mark.skipif(not INSTALLED, reason="needs the extra `deepspeed`: make test-ports")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_zero_refuses_another_number_of_ranks_until_it_is_converted(
    tmp_path: Path, stage: int, zygote: Zygote
) -> None:
    expected = _train(tmp_path / "undisturbed", stage, 8, 2)
    files, saved = tmp_path / "files", tmp_path / "saved"
    _train(saved, stage, 4, 2, EXPORT=str(files))
    for ranks in (1, 3):
        assert (
            f"the checkpoint of step 4 was saved with ZeRO stage {stage}, 2 ranks, and the engine "
            f"has ZeRO stage {stage}, {ranks} ranks: " in _run(saved, stage, 8, ranks, 93).err
        )
    subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
            *(f"--input_folder={files}/global_step4", f"--output_folder={files}/universal"),
            *("--inject_missing_state", "--num_extract_workers=1", "--num_merge_workers=1"),
        ],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        check=True,
        capture_output=True,
    )
    _train(tmp_path / "converted", stage, 6, 3, UNIVERSAL=str(files))
    found = _train(tmp_path / "converted", stage, 8, 3, UNIVERSAL=str(files))
    assert found == pytest.approx(expected, abs=1e-4)


def test_any_object_is_packed_as_tensors_and_a_pickle() -> None:
    shared = torch.arange(6.0)
    value = OrderedDict(
        tensors=(shared, [shared[2:4]], {3: torch.ones(2, dtype=torch.bfloat16)}),
        again=shared,
        parameter=torch.nn.Parameter(torch.zeros(2)),
        none=None,
    )
    packed = pack(value)
    assert set(packed["tensors"]) == {"0", "1", "2", "3"}, "a tensor that occurs twice is one"
    assert packed["tensors"]["0"].data_ptr() == shared.data_ptr(), "not a copy"
    found = unpack(packed)
    assert type(found) is OrderedDict
    assert list(found) == list(value)
    first, (second,), by_number = found["tensors"]
    assert torch.equal(first, shared)
    assert torch.equal(second, shared[2:4])
    assert torch.equal(by_number[3], torch.ones(2, dtype=torch.bfloat16))
    assert found["again"] is first
    assert found["none"] is None
    assert torch.equal(found["parameter"], torch.zeros(2))


def test_without_tensors_there_is_only_the_pickle() -> None:
    packed = pack({"step": (3, "a")})
    assert packed["tensors"] == {}
    assert unpack({"pickle": packed["pickle"]}) == {"step": (3, "a")}, "as it is restored"

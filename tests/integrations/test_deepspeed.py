"""DeepSpeed's engine with `outlast.integrations.deepspeed`, on real ranks, through faults."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from integrations.faulty_runs import losses_of
from outlast.integrations.common import pack, unpack
from zygote import Zygote

SCRIPT = Path(__file__).parent / "scripts" / "deepspeed_training.py"
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
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_zero_survives_faults_bit_by_bit(tmp_path: Path, stage: int, zygote: Zygote) -> None:
    expected = losses_of(tmp_path / "undisturbed", SCRIPT, [str(stage), "saved"], nprocs=2)
    # The last line of each rank is the hash of the final weights.
    assert set(expected) == {(rank, step) for rank in (0, 1) for step in range(1, STEPS + 2)}
    arguments = [str(stage), "saved"]
    found = losses_of(tmp_path / "disturbed", SCRIPT, arguments, nprocs=2, faults=FAULTS, stop_at=5)
    assert found == expected


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

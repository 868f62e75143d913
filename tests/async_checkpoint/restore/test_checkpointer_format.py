"""The format is torch.distributed.checkpoint's, for every type that it supports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from async_checkpoint.checkpoints import NET, copy_of, folder_of, restored, same, state_of
from outlast.async_checkpoint import Checkpointer
from outlast.errors import CheckpointError
from procs import Job

Ranks = Callable[..., Job]

PLAIN = """
import sys
sys.modules["outlast"] = None                     # it cannot be imported
import torch, torch.distributed.checkpoint as dcp
expected = torch.load(sys.argv[2], weights_only=False)
state = torch.load(sys.argv[3], weights_only=False)
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b
assert equal(expected, state), (expected, state)
assert "outlast" not in sys.modules or sys.modules["outlast"] is None
"""


def everything() -> dict[str, Any]:
    """Values and containers of all kinds; tensors of each type and form."""
    torch.manual_seed(3)
    base = torch.randn(6, 8)
    tied = torch.randn(3, 4)
    return {
        "nested": {"list": [1, {"deep": [torch.arange(3), "text"]}, 2.5], 7: {0: torch.ones(2)}},
        "tuple": (1, "two", 3.0),
        "none": None,
        "true": True,
        "set": {1, 2},
        "bytes": b"\0\xff",
        "text": "\u00e4\u4e2d",
        "a key.with/strange é characters": torch.ones(1),
        "float64": torch.randn(5, dtype=torch.float64),
        "bfloat16": torch.randn(5).bfloat16(),
        "float16": torch.randn(5).half(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.randn(4, dtype=torch.complex64),
        "int8": torch.arange(5, dtype=torch.int8),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "number": torch.tensor(4.25),
        "whole number": torch.tensor(4),
        "empty": torch.empty(0),
        "empty rows": torch.empty(3, 0),
        "transposed": base.t(),
        "every other": base[::2, ::3],
        "expanded": torch.ones(1, 4).expand(3, 4),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "tied": tied,
        "tied again": tied,
        "part of it": tied[1:],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "channels last": torch.randn(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    }


def zeroed(state: Any) -> Any:
    """A zeroed state of the same structure."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state.detach().contiguous())
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeroed(value) for value in state]
    return None


def test_everything_comes_back(tmp_path: Path) -> None:
    state = everything()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait(NET)
        found = zeroed(state)
        assert checkpointer.restore(found) == 1  # from memory
        assert same(found, detached(state))
    with Checkpointer(tmp_path) as checkpointer:
        found = zeroed(state)
        tensor = found["tied"]
        assert checkpointer.restore(found) == 1  # from storage
        assert same(found, detached(state))
        assert found["tied"] is tensor  # in place


def detached(state: Any) -> Any:
    """The same state with plain tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone().resolve_conj()
    if isinstance(state, dict):
        return {key: detached(value) for key, value in state.items()}
    return [detached(value) for value in state] if isinstance(state, list) else state


def test_into_tensors_that_are_not_in_a_row(tmp_path: Path) -> None:
    value = torch.randn(6, 8)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": value, "y": torch.randn(2, 3, 4, 4)}).wait(NET)
        parameter = torch.nn.Parameter(torch.zeros(8, 6).t())
        found = {"x": parameter, "y": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)}
        checkpointer.restore(found)
        assert torch.equal(parameter, value)
        assert found["x"] is parameter


def test_sparse_and_quantized_tensors_are_values(tmp_path: Path) -> None:
    sparse = torch.eye(4).to_sparse()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"sparse": sparse}).wait(NET)
    with Checkpointer(tmp_path) as checkpointer:
        found = {"sparse": torch.zeros(4, 4).to_sparse()}
        assert checkpointer.restore(found) == 1
        assert torch.equal(found["sparse"].to_dense(), torch.eye(4))


def read_by_plain_torch(folder: Path, expected: Any, tmp_path: Path) -> None:
    torch.save(expected, tmp_path / "expected")
    torch.save(zeroed(expected), tmp_path / "into")
    command = [sys.executable, "-W", "ignore", "-c", PLAIN, str(folder)]
    done = subprocess.run(
        [*command, str(tmp_path / "expected"), str(tmp_path / "into")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_plain_torch_reads_it(tmp_path: Path) -> None:
    state = detached(everything())
    state.pop("float8")  # it has no == there
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, state).wait(NET)
    read_by_plain_torch(folder_of(tmp_path / "c", 1), state, tmp_path)


@pytest.mark.slow
def test_plain_torch_reads_what_several_ranks_wrote(ranks: Ranks, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    with ranks("saves", "many", str(tmp_path / "c"), str(plan), nprocs=3) as job:
        job.start_all()
        assert set(job.wait_all().values()) == {0}, job.errors(0)
    own = {f"own{rank}": torch.full((1000,), 50 + rank) for rank in range(3)}
    read_by_plain_torch(folder_of(tmp_path / "c", 5), {**state_of(5), **own}, tmp_path)


def test_empty_dicts_are_filled(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = copy_of({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved).wait(NET)
    fresh = torch.nn.Linear(3, 2)
    other = torch.optim.Adam(fresh.parameters())
    state = {"net": fresh.state_dict(), "optimizer": other.state_dict()}
    assert state["optimizer"]["state"] == {}
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 1
        assert same(state, saved)
        everything: dict[str, Any] = {}
        assert checkpointer.restore(everything) == 1
        assert same(everything, saved)
    other.load_state_dict(state["optimizer"])
    assert torch.equal(fresh.weight, net.weight)
    assert torch.equal(other.state[fresh.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved = {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(1), "d": 1, "e": 2}
        checkpointer.save(1, saved).wait(NET)
    wrong = {
        "a": torch.zeros(4),
        "b": torch.zeros(2, 2, dtype=torch.float64),
        "c": 5,
        "d": torch.zeros(1),
        "new": torch.zeros(1),
    }
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError) as error:
            checkpointer.restore(wrong)
        for part in (
            "only in the state dict: new",
            "'a' has shape (4,), (3,) was saved",
            "'b' is float64, float32 was saved",
            "'c' is a value, a tensor was saved",
            "'d' is a tensor, a value was saved",
        ):
            assert part in str(error.value)
        assert wrong["a"].sum() == 0  # nothing was loaded
        says = "only in the checkpoint: c, d, e. Build .* strict=False"
        with pytest.raises(CheckpointError, match=says):
            checkpointer.restore({"a": torch.zeros(3), "b": torch.zeros(2, 2)})
        partial = {"a": torch.zeros(3), "new": torch.full((1,), 8.0)}
        assert checkpointer.restore(partial, strict=False) == 1
        assert partial["a"].tolist() == [1, 1, 1]
        assert partial["new"].tolist() == [8]
        with pytest.raises(CheckpointError, match="has shape"):
            checkpointer.restore({"a": torch.zeros(4)}, strict=False)


def test_an_empty_folder(tmp_path: Path) -> None:
    assert restored(tmp_path) is None
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {}).wait(NET)
        assert checkpointer.restore({}) == 0
        assert checkpointer.verify(0).tensors == 0


def test_torch_converts_it_in_the_order_of_the_state(tmp_path: Path) -> None:
    """Though small tensors lie at the beginning of a file."""
    state = {
        "1": torch.randn(9000),
        "0": torch.ones(2),
        "3": torch.randn(40_000),
        "2": torch.ones(1),
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait(NET)
    dcp_to_torch_save(folder_of(tmp_path, 1), tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")
    assert list(found) == list(state)
    assert same(found, state)

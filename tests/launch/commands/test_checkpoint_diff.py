"""`outlast checkpoint diff`: of every kind of content, and of damaged checkpoints."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_checkpoint import made
from async_checkpoint.checkpoints import folder_of
from launch.checkpoint_command import (
    DTYPES,
    error,
    every_kind,
    outlast,
    read_safetensors,
    save,
)
from outlast.async_checkpoint.storage.entries import Shard, TensorEntry
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.chaos.storage import flip_byte

TENSORS = "__0_0.distcp"


def difference(path: Path, *arguments: object) -> dict[str, Any]:
    done = outlast("diff", path, path, "--json", *(arguments or ("--step-a", 1, "--step-b", 2)))
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == int(found["different"])
    return found


def changed(path: Path, one: torch.Tensor, index: Any, value: Any) -> dict[str, Any]:
    """The difference that one changed element makes."""
    other = one.clone()
    other[index] = value
    save(path, {"w": one}, {"w": other})
    (found,) = difference(path)["tensors"]
    assert found["name"] == "w"
    assert found["differing"] == 1
    assert found["elements"] == one.numel()
    return dict(found)


def test_equal_ones(tmp_path: Path) -> None:
    state = every_kind()
    save(tmp_path, state, copy.deepcopy(state))
    done = outlast("diff", tmp_path, tmp_path, "--step-a", 1)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"equal: {len(DTYPES) + 12}\n"
    assert difference(tmp_path)["equal"] == len(DTYPES) + 12


def test_how_much_a_tensor_differs(tmp_path: Path) -> None:
    one = torch.zeros(300, 5)
    other = one.clone()
    other[7, 3], other[9, 0], other[299, 4] = 0.5, -4, -0.0
    save(tmp_path, {"w": one, "same": one}, {"w": other, "same": one})
    found = difference(tmp_path)
    assert found["tensors"] == [
        {
            "name": "w",
            "dtype": "float32",
            "shape": [300, 5],
            "elements": 1500,
            "differing": 3,
            "first": [7, 3],
            "max_abs": 4.0,
            "max_rel": 1.0,
            "non_finite": 0,
        }
    ]
    assert found["equal"] == 1
    done = outlast("diff", tmp_path, tmp_path, "--step-a", 1)
    assert done.exit_code == 1
    title, row, last = done.stdout.splitlines()
    assert re.split("  +", title) == [
        *("tensor", "differ", "of", "first at", "max abs", "max rel", "not finite")
    ]
    assert row.split() == ["w", "3", "1500", "[7,", "3]", "4", "1", "-"]
    assert last == "different tensors: 1, equal: 1"


@pytest.mark.slow
def test_numbers_are_compared_exactly_and_not_a_number_bit_by_bit(tmp_path: Path) -> None:
    large = torch.tensor([0, 2**63 - 1, -(2**63)])
    assert changed(tmp_path / "a", large, 1, 2**63 - 2)["max_abs"] == 1
    assert changed(tmp_path / "b", large, 1, -(2**63))["max_abs"] == 2**64 - 1
    nan = torch.tensor([math.nan, 1.0, math.inf])
    found = changed(tmp_path / "c", nan, 1, math.nan)
    assert (found["first"], found["max_abs"], found["non_finite"]) == ([1], None, 1)
    found = changed(tmp_path / "d", nan, 2, 1.0)
    assert (found["first"], found["max_abs"], found["non_finite"]) == ([2], None, 1)
    assert changed(tmp_path / "e", torch.ones(3).bfloat16(), 2, 1.5)["max_abs"] == 0.5
    found = changed(tmp_path / "f", torch.ones(2, 2).to(torch.float8_e4m3fn), (1, 0), 4.0)
    assert (found["first"], found["max_abs"], found["max_rel"]) == ([1, 0], 3.0, 0.75)
    wide = torch.ones(2, dtype=torch.complex128)
    assert changed(tmp_path / "g", wide, 1, 1 + 2j)["max_abs"] == 2.0
    assert changed(tmp_path / "h", torch.tensor([True, False]), 1, True)["max_abs"] == 1
    assert changed(tmp_path / "i", torch.tensor(2.0), (), 3.0)["first"] == []
    many = torch.zeros(3, 400_000, dtype=torch.uint8)  # more than are compared at a time
    assert changed(tmp_path / "k", many, (2, 399_999), 255)["first"] == [2, 399_999]
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    save(tmp_path / "j", {"w": packed}, {"w": torch.ones(4).byte().view(torch.bits8)})
    (found,) = difference(tmp_path / "j")["tensors"]
    assert (found["differing"], found["max_abs"]) == (4, None)


def test_other_differences_than_of_elements(tmp_path: Path) -> None:
    numbers = {"nan": math.nan, "lr": 0.1, "betas": (0.9, 0.99), "rng": torch.arange(2000)}
    one = {
        "w": torch.ones(2),
        "half": torch.ones(3),
        "was": torch.ones(1),
        "old": 1,
        "n": [numbers],
    }
    other = {"w": torch.ones(3), "half": torch.ones(3).half(), "was": 2, "new": torch.ones(1)}
    save(tmp_path, one, {**other, "n": [{**numbers, "lr": 0.2, "betas": (0.9, 0.999)}]})
    found = difference(tmp_path)
    assert found["only_in_a"] == ["old"]
    assert found["only_in_b"] == ["new"]
    assert found["kinds"] == {
        "half": ["float32 [3]", "float16 [3]"],
        "w": ["float32 [2]", "float32 [3]"],
        "was": ["float32 [1]", "a value"],
    }
    assert found["values"] == {
        "n.0.betas": ["(0.9, 0.99)", "(0.9, 0.999)"],
        "n.0.lr": ["0.1", "0.2"],
    }
    assert found["equal"] == 2
    done = outlast("diff", tmp_path, tmp_path, "--step-a", 1)
    assert "n.0.lr: 0.1 in A, 0.2 in B" in done.stdout
    assert "half: float32 [3] in A, float16 [3] in B" in done.stdout
    assert "only in B: new" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "different values: 2, of another type or shape: 3, only in A: 1, only in B: 1, equal: 2"
    )


def test_values_that_are_equal_though_their_pickles_differ(tmp_path: Path) -> None:
    text = "x" * 3
    save(
        tmp_path,
        {"v": (text, text), "w": torch.ones(1)},
        {"v": (text, "xx" + text[:1]), "w": torch.ones(1)},
    )
    assert difference(tmp_path)["different"] is False
    sparse = [torch.sparse_coo_tensor([[0]], [x], (3,), check_invariants=True) for x in (1.0, 2.0)]
    save(tmp_path / "s", *({"v": each, "w": torch.ones(1)} for each in sparse))
    assert list(difference(tmp_path / "s")["values"]) == ["v"]
    one, other = torch.zeros(5000), torch.zeros(5000)
    other[2500] = 1  # not in the text of a long tensor
    save(tmp_path / "t", *({"v": (each,), "w": torch.ones(1)} for each in (one, other)))
    assert list(difference(tmp_path / "t")["values"]) == ["v"]


def test_equal_stored_checksums_are_not_read_and_the_rest_is_verified(tmp_path: Path) -> None:
    frozen, head = torch.randn(2 << 20), torch.zeros(1000)
    # Small tensors lie first: the first chunk of the first one is the head's too.
    state = {"frozen": [frozen, frozen + 1], "head": head}
    save(tmp_path, state, {**state, "head": head + 1})
    file = folder_of(tmp_path, 1) / TENSORS
    flip_byte(file, 13 << 20)  # a chunk that both have
    (found,) = difference(tmp_path)["tensors"]
    assert (found["name"], found["differing"], found["max_abs"]) == ("head", 1000, 1.0)
    flip_byte(file, 5 << 20)
    done = outlast("diff", tmp_path, tmp_path, "--step-a", 1, "--step-b", 2)
    message = error(done, code=2)
    assert "step-00000001/" in message
    assert "is damaged between bytes" in message
    assert done.stdout == ""


def test_other_places_of_an_equal_file_are_compared(tmp_path: Path) -> None:
    files = {"f": np.arange(4, dtype=np.int32).tobytes()}
    for step, at in enumerate((0, 8), 1):
        tensors = {"w": TensorEntry(["w"], "int32", [2], [Shard([0], [2], "f", at)])}
        made.save(LocalStorage(tmp_path), step, files, tensors=tensors)
    (found,) = difference(tmp_path)["tensors"]
    assert (found["differing"], found["max_abs"]) == (2, 2)
    files = {"f": bytes(4), "g": bytes([1, 0, 0, 0])}
    for step, (first, second) in enumerate(("fg", "gf"), 3):
        shards = [Shard([0], [1], first, 0), Shard([1], [1], second, 0)]
        tensors = {"w": TensorEntry(["w"], "int32", [2], shards)}
        made.save(LocalStorage(tmp_path), step, files, tensors=tensors)
    (found,) = difference(tmp_path, "--step-a", 3, "--step-b", 4)["tensors"]
    assert (found["differing"], found["max_abs"]) == (2, 1)


def test_the_distribution_over_files_makes_no_difference(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.int32).reshape(4, 6)

    def save(step: int, values: np.ndarray[Any, Any], *cuts: tuple[int, int, int, int]) -> None:
        files, shards = {}, []
        for number, (top, bottom, left, right) in enumerate(cuts):
            part = values[top:bottom, left:right]
            files[f"{number}"] = b"???" * number + part.tobytes()
            shards.append(Shard([top, left], list(part.shape), f"{number}", 3 * number))
        tensors = {"w": TensorEntry(["w"], "int32", [4, 6], shards)}
        made.save(LocalStorage(tmp_path), step, files, tensors=tensors)

    other = values.copy()
    other[2, 5] = -1
    save(1, values, (0, 4, 0, 6))
    save(2, values, (0, 1, 2, 6), (0, 4, 0, 2), (1, 4, 2, 6))
    save(3, other, (0, 2, 0, 6), (2, 4, 0, 3), (2, 4, 3, 6))
    assert difference(tmp_path)["different"] is False
    (found,) = difference(tmp_path, "--step-a", 2, "--step-b", 3)["tensors"]
    assert (found["first"], found["max_abs"], found["differing"]) == ([2, 5], 18, 1)
    for step, expected in ((2, values), (3, other)):
        file = tmp_path / f"{step}.safetensors"
        assert outlast("export", tmp_path, "--step", step, "-o", file).exit_code == 0
        assert np.array_equal(read_safetensors(file)[0]["w"].numpy(), expected)

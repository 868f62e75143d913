"""What a rank receives from another one is read without running code that it names."""

from __future__ import annotations

import collections
import datetime
import enum
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from outlast.elastic.job.encoding import (
    dump_header,
    dump_plain,
    load_plain,
    load_shapes,
    load_state,
)
from outlast.elastic.job.live.frozen import Leaf
from outlast.elastic.job.live.transfer import Exchange

SHAPES = [("float32", (2, 3)), ("int64", ())]


class Kind(enum.Enum):
    ONE, TWO = 1, 2


class Pair(NamedTuple):
    number: int
    path: Path


class Touches:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_header_is_read_as_it_was_made() -> None:
    state = {"leaf": Leaf(1, False), "tensor": torch.arange(3), "steps": (3, [0.5, None, b"x"])}
    state["milestones"] = collections.Counter([10, 20])  # of torch's MultiStepLR
    header = dump_header(state, SHAPES)
    assert load_shapes(header) == SHAPES
    found = load_state(header, [Leaf])
    assert torch.equal(found.pop("tensor"), state.pop("tensor"))
    assert found == state


def test_a_header_runs_no_code(tmp_path: Path) -> None:
    header = dump_header({"state": Touches(tmp_path / "made")}, SHAPES)
    assert load_shapes(header) == SHAPES  # the tensors can be received, and the transfer ends
    with pytest.raises(ValueError, match="more than tensors and plain values"):
        load_state(header, [Leaf])
    assert not (tmp_path / "made").exists()


def test_equal_plain_values_are_equal_bytes_with_tensors() -> None:
    """As of torchdata's loaders, whose state has that of a generator."""

    def state() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        return {"drawn": generator.get_state(), "at": (1, torch.ones(2, 0, dtype=torch.bfloat16))}

    assert dump_plain(state()) == dump_plain(state())
    found = load_plain(dump_plain(state()))
    assert torch.equal(found["drawn"], state()["drawn"])
    assert (found["at"][1].shape, found["at"][1].dtype) == ((2, 0), torch.bfloat16)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3)[:, ::2],
        np.zeros((0, 3), dtype=np.int16),
        np.array([True, False]),
        np.array(2 + 1j),
        np.float64(0.1),
        np.int32(-7),
        np.bool_(True),
    ],
)
def test_plain_values_have_arrays_and_numbers_of_numpy(value: Any) -> None:
    (found,) = load_plain(dump_plain([value]))
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert np.array_equal(found, value)
    if isinstance(found, np.ndarray):
        found[...] = 0  # it can be written to


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 1, 2, 3),
        collections.deque([1, (2.5,)], maxlen=3),
        collections.OrderedDict(a=[1]),
        collections.Counter("aab"),
        frozenset({1}),
        Path("/a/b"),
        Kind.TWO,
        Pair(1, Path("b")),
        1j,
        bytearray(b"x"),
        torch.float32,
        torch.Size([2]),
    ],
)
def test_plain_values_have_what_a_checkpoint_accepts(value: Any) -> None:
    (found,) = load_plain(dump_plain([value]))
    assert (type(found), found) == (type(value), value)


def test_an_array_of_objects_is_no_plain_value() -> None:
    with pytest.raises(ValueError, match="no plain value"):
        load_plain(dump_plain(np.array([None])))


def test_plain_values_run_no_code(tmp_path: Path) -> None:
    value = {"buffers": {"mean": ("float32", [2], b"12345678")}, "random": (1, 2.5, [True, None])}
    assert load_plain(pickle.dumps(value)) == value
    with pytest.raises(ValueError, match="mkdir is no plain value"):
        load_plain(pickle.dumps({"state": Touches(tmp_path / "made")}))
    assert not (tmp_path / "made").exists()


def test_a_header_is_made_only_for_a_rank_that_lacks_the_state() -> None:
    frozen: Any = object()  # it has no `header`
    assert Exchange(None, 0).run({}, frozen) is None
    assert Exchange(None, 0).run({2: [1]}, frozen) is None

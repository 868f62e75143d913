"""A restore fills the target that it was given, whatever its layout, or names what it cannot."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.serialization import config

from async_checkpoint.checkpoints import folder_of
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.snapshot import structure
from outlast.async_checkpoint.state_dict import of_any_size
from outlast.async_checkpoint.storage.manifest import MANIFEST, checksum
from outlast.errors import CheckpointMismatch, CheckpointUnsavable


def save(path: Path, state: dict[str, Any]) -> None:
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state).result()


def load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with Checkpointer(path, linger=0) as checkpointer:
        assert checkpointer.restore(state) == 1
    return state


def numbers() -> torch.Tensor:
    return torch.arange(48.0).reshape(6, 8)


def imaginary() -> torch.Tensor:
    return torch.complex(numbers(), numbers() + 1)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "conjugate": lambda: imaginary().conj(),
    "negative": lambda: imaginary().conj().imag,
    "one negative element": lambda: imaginary().conj().imag[1, 1],
    "transposed": lambda: numbers().t(),
    "every second column": lambda: numbers()[:, ::2],
    "expanded": lambda: numbers()[:1].expand(6, 8),
    "one element, expanded": lambda: torch.ones(1).expand(4),
    "overlapping windows": lambda: torch.arange(6.0).unfold(0, 3, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_views_get_the_saved_values(tmp_path: Path, view: str) -> None:
    saved, target = VIEWS[view](), VIEWS[view]()
    base: Any = target._base
    base.zero_()
    save(tmp_path, {"x": saved})
    assert load(tmp_path, {"x": target})["x"] is target
    assert torch.equal(target.resolve_conj().resolve_neg(), saved.resolve_conj().resolve_neg())


def test_different_values_for_elements_that_share_memory(tmp_path: Path) -> None:
    save(tmp_path, {"x": numbers()})
    with pytest.raises(CheckpointMismatch, match="elements of 'x' share their memory here"):
        load(tmp_path, {"x": torch.zeros(1, 8).expand(6, 8)})


@pytest.mark.parametrize("size", [64, 3_000_000])
def test_tied_weights_are_filled_only_with_equal_values(tmp_path: Path, size: int) -> None:
    one, other = torch.full((size,), 1.0), torch.full((size,), 2.0)
    save(tmp_path / "untied", {"embed": one, "head": other})
    save(tmp_path / "tied", {"embed": one, "head": one})
    weight = torch.zeros(size)
    for _ in range(3):
        with pytest.raises(CheckpointMismatch, match="'embed' and 'head' share memory here"):
            load(tmp_path / "untied", {"embed": weight, "head": weight})
    load(tmp_path / "tied", {"embed": weight, "head": weight})
    assert torch.equal(weight, one)


@pytest.mark.parametrize("one", [torch.ones(()), torch.ones(4)[1::4]])
def test_one_element_that_is_tied(tmp_path: Path, one: torch.Tensor) -> None:
    save(tmp_path, {"a": one, "b": one})
    target = torch.zeros_like(one).as_strided(one.shape, one.stride())
    load(tmp_path, {"a": target, "b": target})
    assert torch.equal(target, one)


def test_parts_of_one_tensor(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    save(tmp_path / "overlap", {"a": whole[:6].clone(), "b": whole[4:].clone()})
    save(tmp_path / "between", {"a": whole[::2].clone(), "b": whole[1::2].clone()})
    save(tmp_path / "differ", {"a": whole[:6].clone(), "b": whole[4:] + 1})
    target = torch.zeros(10)
    load(tmp_path / "overlap", {"a": target[:6], "b": target[4:]})
    assert torch.equal(target, whole)
    target = torch.zeros(10)
    load(tmp_path / "between", {"a": target[::2], "b": target[1::2]})
    assert torch.equal(target, whole)
    with pytest.raises(CheckpointMismatch, match="'a' and 'b' share memory here"):
        load(tmp_path / "differ", {"a": target[:6], "b": target[4:]})


class Extra(nn.Module):
    """Its extra state changes."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.ones(2)), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


EXTRA: dict[str, tuple[Any, Any]] = {
    "a longer tensor": (torch.arange(22), torch.empty(0, dtype=torch.int64)),
    "another dtype": (torch.ones(3), torch.ones(3, dtype=torch.int32)),
    "more tensors in a list": ({"h": [torch.ones(1), torch.zeros(2)]}, {"h": []}),
    "a list for an empty one": ([torch.ones(1), 2], []),
    "other keys": ({"a": 1, "b": torch.ones(2)}, {"c": 3}),
    "a dict for a tensor": ({"a": torch.ones(2)}, torch.ones(1)),
    "a value for a dict": (b"bytes", {"a": torch.ones(2)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXTRA)
def test_an_extra_state_is_replaced(tmp_path: Path, kind: str) -> None:
    """From memory, and from the files."""
    saved, present = EXTRA[kind]

    def restores(checkpointer: Checkpointer) -> None:
        other = Extra(copy.deepcopy(present))
        state = {"model": {"0": other.state_dict()}}
        checkpointer.restore(state)
        other.load_state_dict(state["model"]["0"])
        if isinstance(saved, dict):  # in another order
            assert other.state.keys() == saved.keys()
            other.state = {key: other.state[key] for key in saved}
        assert repr(other.state) == repr(saved)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": {"0": Extra(saved).state_dict()}}).result()
        restores(checkpointer)
    with Checkpointer(tmp_path, linger=0) as checkpointer:
        restores(checkpointer)


def test_a_file_in_memory_comes_back_at_its_position(tmp_path: Path) -> None:
    for content, at in ((b"some bytes", 4), (b"", 0)):
        file = io.BytesIO(content)
        file.seek(at)
        save(tmp_path / str(at), {"file": file})
        found = load(tmp_path / str(at), {"file": None})["file"]
        assert (type(found), found.getvalue(), found.tell()) == (io.BytesIO, content, at)


def test_an_empty_list_is_filled(tmp_path: Path) -> None:
    save(tmp_path, {"history": [torch.ones(2), 3, {"a": 4}], "empty": []})
    found = load(tmp_path, {"history": [], "empty": []})
    assert found["history"][1:] == [3, {"a": 4}]
    assert torch.equal(found["history"][0], torch.ones(2))
    assert found["empty"] == []


def shape_of(value: Any) -> Any:
    """The kinds of dicts and lists, and the order of keys."""
    if isinstance(value, dict):
        return type(value), [(key, shape_of(each)) for key, each in value.items()]
    return [shape_of(each) for each in value] if isinstance(value, list) else type(value)


@pytest.mark.slow
@pytest.mark.parametrize("linger", [0, 60])
def test_an_empty_dict_is_filled_in_the_order_and_with_the_dicts_of_the_saved_one(
    tmp_path: Path, linger: int
) -> None:
    saved: dict[str, Any] = {
        "step": 3,
        "weights": OrderedDict(b=torch.ones(2), a=1, c=torch.ones(1)),
        "empty": {},
        "counts": Counter("aab"),
        "none": Counter(),
        7: [{}, 1, torch.ones(1), {"of": OrderedDict()}],
        "rates": {"warm": {"up": {}}, "x": torch.ones(1)},
    }
    with Checkpointer(tmp_path, linger=linger) as checkpointer:
        checkpointer.save(1, saved).result()
        if linger:
            found: dict[str, Any] = {}
            assert checkpointer.restore(found) == 1
            assert shape_of(found) == shape_of(saved)
    assert shape_of(load(tmp_path, {})) == shape_of(saved)
    assert shape_of(load(tmp_path, {**saved, 7: [], "rates": defaultdict(list)})["rates"]) == (
        defaultdict,
        shape_of(saved["rates"])[1],
    )
    parts: dict[str, Any] = {"weights": OrderedDict(), "rates": {"x": torch.zeros(1), "warm": {}}}
    with Checkpointer(tmp_path, linger=0) as checkpointer:
        checkpointer.restore(parts, strict=False)
    assert list(parts["weights"]) == ["b", "a", "c"]
    assert parts["rates"]["warm"] == {"up": {}}


def test_a_name_that_would_not_be_seen_in_an_error_is_quoted(tmp_path: Path) -> None:
    save(tmp_path, {"": torch.ones(1), "a\n": 1, "b": 2})
    with pytest.raises(CheckpointMismatch, match=r"only in the checkpoint: '', 'a\\n'\. Build"):
        load(tmp_path, {"b": 0})


def test_a_checkpoint_of_the_format_before_is_read(tmp_path: Path) -> None:
    save(tmp_path, {"value": 3, "tensor": torch.ones(2), "none": {}})
    (path,) = tmp_path.rglob(MANIFEST)
    line, _, body = path.read_bytes().partition(b"\n")
    manifest = json.loads(body)
    del manifest["containers"]
    for entry in (*manifest["tensors"].values(), *manifest["values"].values()):
        del entry["order"]
    body = json.dumps(manifest).encode()
    head = {**json.loads(line), "version": 2, "bytes": len(body), "xxh3_128": checksum(body)}
    line = json.dumps({k: v for k, v in head.items() if k != "line_xxh3_128"}).encode()
    sealed = b', "line_xxh3_128": "' + checksum(line).encode() + b'"}\n'
    path.write_bytes(line[:-1] + sealed + body)
    found = load(tmp_path, {})
    assert list(found) == ["tensor", "value"]
    assert found["value"] == 3


def test_a_view_in_a_value_is_saved_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    whole = torch.arange(1_000_000)
    small = torch.arange(6)
    save(tmp_path, {"x": (whole[1:3], [small[:3], small[3:]])})
    assert sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()) < 1 << 20
    view, (first, second) = load(tmp_path, {"x": None})["x"]
    assert view.tolist() == [1, 2]
    assert torch.equal(torch.cat([first, second]), small)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_a_tensor_of_any_size_has_that_of_the_candidate_that_is_intact(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, linger=0) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"seen": torch.full((2 * step,), 0.5)}).result()
    (file,) = folder_of(tmp_path, 2).glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    target = {"seen": of_any_size(torch.zeros(4))}
    assert torch.equal(load(tmp_path, target)["seen"], torch.full((2,), 0.5))


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
def test_a_tensor_that_is_not_aligned_in_its_file_is_refused(
    tmp_path: Path, alignment: int
) -> None:
    """It depends on the names and on torch where it would lie: a saved one is right."""
    state = {f"{n}": torch.full((3,), complex(n, 1), dtype=torch.complex128) for n in range(3)}
    structure.frame.cache_clear()
    handle = None
    with (
        config.patch("save.storage_alignment", alignment),
        Checkpointer(tmp_path, linger=0) as checkpointer,
        contextlib.suppress(CheckpointUnsavable),
    ):
        handle = checkpointer.save(1, state)
        handle.result()
    structure.frame.cache_clear()
    if handle is not None:
        found = load(tmp_path, {name: torch.zeros_like(each) for name, each in state.items()})
        assert all(torch.equal(found[name], each) for name, each in state.items())

"""A tensor that wraps others is saved as those, and filled in place; or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from outlast.async_checkpoint import Checkpointer
from outlast.errors import CheckpointError, CheckpointMismatch, CheckpointUnsavable
from scaled_tensors import Scaled


class Other(Scaled):
    """Of another name, with the same tensors inside."""


class Nested(Scaled):
    """Its scale wraps tensors, too."""

    def value(self) -> torch.Tensor:
        scale: Any = self.scale
        return self.content.to(torch.float32) * scale.value()


def weight(value: int = 3, shape: tuple[int, ...] = (6, 8), kind: str = "") -> Scaled:
    return Scaled(torch.full(shape, value, dtype=torch.int8), torch.tensor(value / 4), kind)


def nested(value: int) -> Scaled:
    scale: Any = weight(value, ())
    return Nested(torch.full((4,), value, dtype=torch.int8), scale)


def save(path: Path, state: dict[str, Any]) -> None:
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state).result()


def load(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    with Checkpointer(path, linger=0) as checkpointer:
        assert checkpointer.restore(state, **options) == 1
    return state


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("size", [8, 300])
def test_it_is_filled_in_place(tmp_path: Path, memory: bool, size: int) -> None:
    saved = {"m": {"a.w": weight(3, (size, size)), "b": [nested(5), 1]}}
    target = {"m": {"a.w": weight(9, (size, size)), "b": [nested(9), 2]}}
    (w, (n, _)) = target["m"]["a.w"], target["m"]["b"]  # type: ignore[misc]
    content = w.content
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved).result()
        saved["m"]["a.w"].content.fill_(100)  # type: ignore[union-attr]
        if memory:
            checkpointer.restore(target)
    if not memory:
        load(tmp_path, target)
    assert target["m"]["a.w"] is w
    assert w.content is content
    assert w.content.unique().tolist() == [3]
    assert w.scale.item() == 0.75
    assert target["m"]["b"] == [n, 1]
    assert n.content.unique().tolist() == [5]
    assert n.scale.content.item() == 5


def test_each_save_has_what_was_written_since(tmp_path: Path) -> None:
    w = weight(3)
    with Checkpointer(tmp_path) as checkpointer:
        for step, value in enumerate((5, 6, 7)):
            w.content.fill_(value)
            checkpointer.save(step, {"w": w}).result()
        for step, value in enumerate((5, 6, 7)):
            checkpointer.restore({"w": w}, step=step)
            assert w.content.unique().tolist() == [value]


def test_without_a_tensor_to_fill_it_comes_back_as_a_dict(tmp_path: Path) -> None:
    save(tmp_path, {"m": {"w": weight()}, "n": nested(5)})
    found = load(tmp_path, {})
    w = found["m"]["w"]
    assert set(w) == {"(subclass)", "content", "scale"}
    assert w["(subclass)"].startswith("Scaled {'kind': ''}")
    assert torch.equal(w["content"], weight().content)
    assert found["n"]["scale"]["content"].item() == 5


class Holder(Scaled):
    """Has other names inside."""

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, str]]:
        return ["content"], {"kind": self.kind}


MISFITS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a plain tensor": (weight, lambda: torch.zeros(6, 8)),
    "saved as a plain tensor": (lambda: torch.zeros(6, 8), weight),
    "another class": (weight, lambda: Other(*weight().__dict__.values())),
    "another shape": (weight, lambda: weight(9, (6, 9))),
    "other metadata": (weight, lambda: weight(9, kind="x")),
    "another dtype inside": (
        weight,
        lambda: Scaled(torch.zeros(6, 8, dtype=torch.int16), torch.tensor(1.0)),
    ),
    "other names inside": (weight, lambda: Holder(*weight().__dict__.values())),
    "a value": (weight, lambda: 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MISFITS)
def test_another_tensor_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    saved, target = MISFITS[kind]
    save(tmp_path, {"x": {"w": saved()}})
    for strict in (True, False) if kind != "a value" else (True,):
        into = target()
        before = repr(into)
        with pytest.raises(CheckpointMismatch, match=r"x\.w"):
            load(tmp_path, {"x": {"w": into}}, strict=strict)
        assert repr(into) == before


def test_devices_and_addresses_in_its_metadata_may_differ(tmp_path: Path) -> None:
    class About(Scaled):
        def __tensor_flatten__(self) -> Any:
            return ["content", "scale"], {"device": torch.device(self.kind), "by": object()}

    def made(device: str, value: int) -> Scaled:
        return About(*list(weight(value).__dict__.values())[:2], device)

    save(tmp_path, {"w": made("cuda:1", 3)})
    target = made("cpu", 4)
    load(tmp_path, {"w": target})
    assert target.content.unique().tolist() == [3]


class Opaque(torch.Tensor):
    """Wraps a tensor, and does not tell which."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Opaque:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: Opaque = make(cls, inside.shape, dtype=inside.dtype)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(args[0].inside, *args[1:])


def test_what_does_not_tell_its_tensors_is_refused(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(CheckpointUnsavable, match=r"'x\.w' is a Opaque, which has no data"),
    ):
        checkpointer.save(1, {"x": {"w": Opaque(torch.ones(4, 4))}})


@pytest.mark.filterwarnings("ignore:DTensor random operators may not")  # torch 2.6
def test_a_sharded_one_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(6, 8), init_device_mesh("cpu", (1,)), [Shard(0)])
        sharded._local_tensor = weight()
        with (
            Checkpointer(tmp_path) as checkpointer,
            pytest.raises(
                CheckpointUnsavable, match=r"'x\.w' is a DTensor of Scaled, which has no"
            ),
        ):
            checkpointer.save(1, {"x": {"w": sharded}})
    finally:
        dist.destroy_process_group()


def freed(shape: int = 4) -> torch.Tensor:
    made = torch.ones(shape + 4)[4:]
    made.untyped_storage().resize_(0)
    return made


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (freed, "has no data: its storage was freed"),
        (lambda: torch.ones(3, 3).to_mkldnn(), "is a oneDNN tensor, which cannot"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "is a nested tensor, which cannot"),
    ],
)
def test_a_tensor_without_data_that_can_be_copied_is_refused(
    tmp_path: Path, make: Callable[[], torch.Tensor], why: str
) -> None:
    with Checkpointer(tmp_path, linger=0) as checkpointer:
        with pytest.raises(CheckpointUnsavable, match=rf"'x\.w' {why}"):
            checkpointer.save(1, {"x": {"w": make()}})
        checkpointer.save(2, {"x": {"w": torch.ones(4)}}).result()
        with pytest.raises(CheckpointError, match=rf"'x\.w' {why}"):
            checkpointer.restore({"x": {"w": make()}})

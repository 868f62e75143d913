"""What a rank tells the others of its snapshot in memory: only what they lack."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from outlast.async_checkpoint import Checkpointer
from outlast.errors import CheckpointError

STATE = {
    "weight": torch.arange(5000.0),
    "moments": {"a": torch.ones(3), "b": torch.ones(2)},
    "groups": OrderedDict(lr=0.1, step=7),
}


def _lacks(path: Path, state: dict[str, Any]) -> list[str] | None:
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, STATE).wait()
        restorer = checkpointer.restorer
        (snapshot,) = restorer.snapshots(-1).values()
        return restorer._memory_of(snapshot).lacks(state, restorer._items)


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({}, []),
        ({"more": torch.ones(1)}, ["more"]),
        ({"more": {"x": 1}, "other": 2}, ["more.x", "other"]),
        ({"moments": {"a": torch.ones(3)}}, None),  # this rank cannot say whether another has it
        ({"moments": {}}, None),
        ({"more": {}}, None),
        ({"more": torch.ones(1), "m._extra_state": 1}, None),
    ],
)
def test_what_a_part_lacks(tmp_path: Path, changed: dict[str, Any], lacking: Any) -> None:
    assert _lacks(tmp_path, {**STATE, **changed}) == lacking


def test_another_part_of_a_tensor_is_lacking(tmp_path: Path) -> None:
    assert _lacks(tmp_path, {**STATE, "weight": torch.ones(4000)}) == ["weight"]


def test_only_what_is_wanted_is_told(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE).wait()
        restorer = checkpointer.restorer
        (snapshot,) = restorer.snapshots(-1).values()
        memory = restorer._memory_of(snapshot)
        own = memory.source.contents
        everything = memory.told(None)["contents"]
        assert everything == msgspec.to_builtins(own)
        told = memory.told(["groups.step", "moments.b", "of another rank"])
        assert list(told["contents"]["tensors"]) == ["moments.b"]
        assert list(told["contents"]["values"]) == ["groups.step"]
        assert set(told["contents"]["files"]) == set(own.files)
        few = memory.told(["moments.b"])["contents"]["files"]
        assert list(few) == [own.tensors["moments.b"].shards[0].file]
        other = {**told, "contents": _renamed(told["contents"])}
        restored = {"moments": {"b": torch.zeros(2), "c": torch.zeros(2)}}
        whole, lacking, parts = memory.index_for(
            restored, restorer._items, [told, other], fills=True
        )
        assert lacking == ["moments.c"]
        assert set(whole.tensors) == {"weight", "moments.a", "moments.b", "moments.c"}
        assert set(whole.values) == {"groups.lr", "groups.step"}
        assert [set(part.tensors) for part in parts] == [{"moments.b"}, {"moments.c"}]
        told["contents"]["tensors"]["moments.b"]["path"] = ["moments", "a"]
        with pytest.raises(CheckpointError, match="is not described correctly"):
            memory.index_for(restored, restorer._items, [told, other], fills=True)


def _renamed(contents: dict[str, Any]) -> dict[str, Any]:
    """As if another rank held a tensor of another name."""
    entry = {**contents["tensors"]["moments.b"], "path": ["moments", "c"]}
    return {**contents, "tensors": {"moments.c": entry}, "values": {}}

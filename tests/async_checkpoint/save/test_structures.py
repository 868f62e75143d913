"""What the ranks have agreed to save, and the records of what they have saved."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.async_checkpoint.save import structures as structures_module
from outlast.async_checkpoint.save.structures import (
    METADATA,
    Catalog,
    StructureMemo,
    Structures,
)
from outlast.async_checkpoint.snapshot.plan import (
    Item,
    decode_items,
    describe,
    encode_plan,
    share_out,
)
from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.async_checkpoint.state_dict import signature_and_leaves
from outlast.async_checkpoint.storage.manifest import CHUNK_BYTES
from outlast.errors import CheckpointError


def encode_items(items: list[Item]) -> bytes:
    return b"\n".join(encode_plan(items))


def decoded(content: bytes) -> list[Item]:
    return [item for line in content.split(b"\n") for item in decode_items(line)]


def record(structure: Structure, **changed: Any) -> bytes:
    files = {name: {"size_bytes": size, "checksums": []} for name, _, size in structure.files}
    said = {"step": 1, "id": "save", "structure": structure.digest, "files": files, "places": []}
    return json.dumps({**said, **changed}).encode()


def test_a_rank_that_saves_another_structure_than_was_agreed_is_found() -> None:
    items = [describe({"a": torch.ones(3), f"own{rank}": torch.ones(2)}) for rank in range(2)]
    structures = {r: Structure(items[r], [i.key for i in items[r]][r:], r) for r in range(2)}
    catalog = Catalog(structures)
    records = [record(structures[rank]) for rank in range(2)]
    manifest, metadata = catalog.manifest(records, 1, "save", None)
    assert set(manifest.tensors) == {"a", "own0", "own1"}
    assert manifest.files[METADATA].size_bytes == len(metadata)
    other = Structure(items[1], [i.key for i in items[1]], 1)
    for changed, why in (
        (record(other), "rank 1 has saved another structure"),
        (record(structures[1], id="other"), "rank 1 wrote into another folder: other"),
        (record(structures[1], step=2), "rank 1 has saved step 2, not 1"),
        (record(structures[1], files={}), "rank 1 has written other files than agreed: {}"),
    ):
        with pytest.raises(CheckpointError, match=why):
            catalog.manifest([records[0], changed], 1, "save", None)


def test_the_same_items_have_the_same_digest_on_every_rank() -> None:
    state = {"a": [torch.ones(2, 3), {"b": torch.ones(4), 7: 1.5}]}
    items = describe(state)
    keys = [item.key for item in items]
    there = decoded(encode_items(items))
    assert Structure(items, keys, 3).digest == Structure(there, keys, 3).digest
    assert Structure(items, keys, 3).digest != Structure(items, keys[1:], 3).digest


def test_a_rank_keeps_its_share_when_another_one_changes() -> None:
    structures = Structures(StructureMemo(), 0, 2)
    large = torch.ones(1 << 16)
    both = [encode_items(describe({"a": large, "b": large})) for _ in range(2)]
    first = structures.divide(both)
    shares = {rank: structures.catalog.structures[rank].digest for rank in range(2)}
    assert set(first) == {"0", "1"}
    more = encode_items(describe({"a": large, "b": large, "c": large}))
    assert set(structures.divide([b"", more])) == {"1"}
    assert structures.catalog.structures[0].digest == shares[0]
    assert structures.catalog.structures[1].digest != shares[1]


class _Text(str):
    pass


@pytest.mark.parametrize("key", [_Text("own"), "é\x7f\u2028", "half \ud800", "\x1e\x00", 1 << 70])
def test_any_key_gives_the_same_digest_on_every_rank(key: Any) -> None:
    items = describe({"a": {key: torch.ones(2), "value": 1}})
    sent = encode_items(items)
    assert b"\x1e" not in sent  # the ledger's mark between two ranks
    there, keys = decoded(sent), [item.key for item in items]
    assert there == items
    assert Structure(items, keys, 0).digest == Structure(there, keys, 0).digest
    assert json.loads(Structure(items, keys, 0).index)["values"][0][1] == ["a", "value"]


def test_what_replicas_have_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[bytes] = []

    def counted(content: bytes) -> Any:
        lines.append(content)
        return decode_items(content)

    monkeypatch.setattr(structures_module, "decode_items", counted)
    memo, large = StructureMemo(), {"a": torch.ones(2)}
    items = [describe({"model": large, "random": {str(rank): 1}}) for rank in range(3)]
    memo.sent = encode_plan(items[0])
    sent = [encode_items(each) for each in items]
    plans = memo.plans([*sent, b"", sent[1]])
    assert lines == [sent[1].split(b"\n")[1], sent[2].split(b"\n")[1]]
    assert {rank: [e for each in plan for e in each] for rank, plan in plans.items()} == {
        0: items[0],
        1: items[1],
        2: items[2],
        4: items[1],
    }
    assert all(plan[0] is memo.sent[sent[0].split(b"\n")[0]] for plan in plans.values())
    assert decoded(encode_items(describe({}))) == []


_SIZES = st.lists(st.sampled_from([1, 1 << 15, 1 << 16]), max_size=6)


@given(
    st.lists(_SIZES, min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=6)
)
def test_replicas_get_the_shares_of_ranks_with_equal_plans(
    sizes: list[list[int]], ranks: list[int]
) -> None:
    kinds = [describe({f"{n}.{s}": torch.empty(s) for n, s in enumerate(each)}) for each in sizes]
    own = {rank: describe({f"own{rank}": 1}) for rank in range(len(ranks))}
    plans = {rank: [kinds[kind % len(kinds)], own[rank]] for rank, kind in enumerate(ranks)}
    shares = share_out(plans)
    apart = share_out({rank: [list(each) for each in plan] for rank, plan in plans.items()})
    assert shares == apart
    keys = [key for each in shares.values() for key in each]
    assert sorted(keys) == sorted({i.key for plan in plans.values() for each in plan for i in each})


def test_parts_of_one_tensor_on_several_ranks_are_one_entry() -> None:
    shape = (4,)
    items = [Item("a", ("a",), "tensor", (2 * r,), (2,), shape, "float32") for r in range(2)]
    structures = {r: Structure([item], [item.key], r) for r, item in enumerate(items)}
    for _ in range(2):  # the structures' own entries stay as they are
        (entry,) = Catalog(structures).tensors.values()
        assert [(s.offsets, s.file) for s in entry.shards] == [
            ((0,), "__0_0.distcp"),
            ((2,), "__1_0.distcp"),
        ]


def test_small_tensors_share_the_first_chunk() -> None:
    """A rank that lacks another's counts of steps reads and verifies one chunk, not each."""
    state = {
        f"layer{n}": {
            "weight": torch.empty(2 << 20),
            "bias": torch.empty(9),
            "step": torch.ones(()),
        }
        for n in range(8)
    }
    items = describe(state)
    structure = Structure(items, [item.key for item in items], 0)
    names = [item.path[1] for item in structure.tensors]
    assert names == ["step"] * 8 + ["bias"] * 8 + ["weight"] * 8
    small = [each for each in structure.extents if each.data_bytes < 64]
    assert {(each.file, each.data_at // CHUNK_BYTES) for each in small} == {("__0_0.distcp", 0)}
    places = [(each.buffer_at, each.data_bytes) for each in structure.extents]
    assert places == sorted(places)
    assert sorted(structure.entries, key=lambda name: structure.entries[name].order) == [
        item.name for item in items
    ]
    assert [i.path[0] for i in structure.tensors if i.path[1] == "weight"] == list(state)


def test_after_a_restart_the_state_is_asked_for_only_because_of_its_meshes() -> None:
    """To make a state dict and its signature is a tenth of the time of a small restore."""
    memo, state = StructureMemo(), {"a": torch.ones(3), "b": {"c": [1, torch.ones(2)]}}
    signature, _ = signature_and_leaves(state)
    known = Structures(memo, 0, 1).agree(state, signature, SimpleNamespace())  # type: ignore[arg-type]
    memo.goes_on = True
    later = Structures(memo, 0, 1)
    assert later.go_on(lambda: pytest.fail("no part of it has a mesh"))
    assert later.known(signature) is known
    # As that of a DTensor: shape, type, placements, and the mesh of a group that is gone.
    later._signature[1] = (*later._signature[1][:2], (), "mesh")
    asked: list[int] = []
    again = Structures(memo, 0, 1)
    assert again.go_on(lambda: (asked.append(1), state)[1])
    assert asked

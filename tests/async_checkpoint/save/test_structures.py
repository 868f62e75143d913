"""What the ranks have agreed to save, and the records of what they have saved."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from outlast.async_checkpoint.save.structures import (
    METADATA,
    Catalog,
    StructureMemo,
    Structures,
)
from outlast.async_checkpoint.snapshot.plan import decode_items, describe, encode_items
from outlast.async_checkpoint.snapshot.structure import Structure
from outlast.errors import CheckpointError


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
    there = decode_items(encode_items(items))
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

"""Writes the tensors of a checkpoint to one file for other programs: a safetensors file, or a state
dict as `torch.save` writes it. Needs neither ranks nor a GPU, and for safetensors no torch.

The safetensors file is written here and not by the package of that name, which takes all tensors at
once: the format is a header in JSON and the data, so one batch of tensors at a time is in memory.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from outlast.async_checkpoint.restore.verified_read import Source
from outlast.async_checkpoint.restore.whole_tensors import batches, read_tensors, read_value
from outlast.async_checkpoint.storage.entries import ITEM_BYTES, flat_name, tree_path
from outlast.system.files import replacing

SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt"}
"""The formats, and how the name of a file of each ends."""

_SAFETENSORS = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8"},
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e8m0fnu": "F8_E8M0"},
    **{"float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64"},
}

TreePath = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Selection:
    """What to export: the path in the exported tree of each tensor and value, by its name."""

    source: Source
    tensors: Mapping[str, TreePath]
    values: Mapping[str, TreePath]

    @property
    def size_bytes(self) -> int:
        return sum(self.source.contents.tensors[name].size_bytes for name in self.tensors)

    def read(self, progress: Callable[[int], None]) -> Iterator[tuple[str, Any]]:
        """Reads each tensor, in the order in which they are in the files; keeps none of them."""
        for batch in batches(self.source, self.tensors):
            tensors = read_tensors(self.source, batch)
            for name in batch:
                yield name, tensors.pop(name)
                progress(self.source.contents.tensors[name].size_bytes)


def select(source: Source, root: str, patterns: Sequence[str]) -> Selection:
    """Selects tensors and values: those under `root` of which the name (without the root) is equal
    to a pattern, is under it, or matches it as a glob; without patterns, all. A `ValueError` if the
    root or a pattern selects nothing, or all of them no tensor.
    """
    under: dict[str, TreePath] = {}
    entries = source.contents.entries
    for name, entry in entries.items():
        path = tree_path(entry.path)
        for depth in range(len(path)):
            if flat_name(path[:depth]) == root:
                under[name] = path[depth:]
    if not under:
        tops = sorted({flat_name(entry.path[:1]) for entry in entries.values()})
        raise ValueError(f"{source.where} has nothing under {root!r}; it has {', '.join(tops)}")
    chosen = set() if patterns else set(under)
    for pattern in patterns:
        matching = {
            name
            for name, path in under.items()
            if f"{flat_name(path)}.".startswith(f"{pattern}.")
            or fnmatchcase(flat_name(path), pattern)
        }
        if not matching:
            similar = difflib.get_close_matches(pattern, map(flat_name, under.values())) or ["none"]
            raise ValueError(f"{source.where} has no {pattern!r}; similar: {', '.join(similar)}")
        chosen |= matching
    found = {name: path for name, path in under.items() if name in chosen}
    tensors = {name: path for name, path in found.items() if name in source.contents.tensors}
    if not tensors:
        raise ValueError(f"no tensor is selected, only {', '.join(found)}")
    return Selection(source, tensors, {n: path for n, path in found.items() if n not in tensors})


def write(
    chosen: Selection, output: Path, kind: str, step: int, progress: Callable[[int], None]
) -> dict[str, str]:
    """Writes a file in a format of `SUFFIXES`. It replaces `output` in one step, when it is
    complete and durable. Every byte that is read is verified. Returns what was left out: names and
    reasons. A `ValueError` if the format has no such dtype or name. A `CheckpointError` if a part
    is missing or damaged. A `CheckpointReadError` if a file cannot be read now.
    """
    with replacing(output, output.with_name(f"{output.name}.draft-{os.getpid()}")) as file:
        if kind == "safetensors":
            return _write_safetensors(chosen, file, step, progress)
        return _write_torch(chosen, file, progress)


def _write_safetensors(
    chosen: Selection, file: BinaryIO, step: int, progress: Callable[[int], None]
) -> dict[str, str]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(step)}}
    places: dict[str, int] = {}
    end = 0
    # The largest elements first: so each tensor is aligned. By name: so the number of ranks that
    # saved the checkpoint does not change the file.
    entries, names = chosen.source.contents.tensors, chosen.tensors
    for name in sorted(names, key=lambda n: (-ITEM_BYTES[entries[n].dtype], flat_name(names[n]))):
        dtype, exported = entries[name].dtype, flat_name(names[name])
        if dtype not in _SAFETENSORS or exported in header:
            what = f"the dtype {dtype}" if exported not in header else "a tensor of this name"
            raise ValueError(f"{name!r}: safetensors does not have {what}; use --format torch")
        places[name], end = end, end + entries[name].size_bytes
        header[exported] = {
            "dtype": _SAFETENSORS[dtype],
            "shape": entries[name].shape,
            "data_offsets": [places[name], end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little") + head)
    for name, values in chosen.read(progress):
        file.seek(8 + len(head) + places[name])
        file.write(values.data)
        del values  # before the next is read
    return dict.fromkeys(chosen.values, "safetensors has only dense tensors; --format torch has it")


def _write_torch(
    chosen: Selection, file: BinaryIO, progress: Callable[[int], None]
) -> dict[str, str]:
    import torch

    from outlast.async_checkpoint import torch_values
    from outlast.async_checkpoint.restore.fit import put

    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, values in chosen.read(progress):
        entry = chosen.source.contents.tensors[name]
        content = torch.from_numpy(values.reshape(-1).view("uint8"))
        found[name] = content.view(getattr(torch, entry.dtype)).reshape(entry.shape)
    for name in chosen.values:
        value = read_value(chosen.source, name)
        try:
            found[name] = torch_values.read(value)
        except pickle.UnpicklingError:
            left_out[name] = "torch.load with weights_only=True would refuse its class"
    paths = {**chosen.tensors, **chosen.values}
    state: Any = [] if isinstance(next(iter(paths.values()))[0], tuple) else {}
    for name, path in paths.items():
        if name in found:
            put(state, path, found[name])
    try:
        torch.save(state, file)
    except RuntimeError as e:  # at the end of the file, of which a write has failed
        if isinstance(e.__context__, OSError):
            raise e.__context__ from e
        raise
    return left_out

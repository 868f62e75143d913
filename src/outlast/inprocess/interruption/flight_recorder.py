"""The collectives that this rank has begun, as torch's flight recorder has them: a ring of the last
ones of all process groups, by default 2,000 (`TORCH_FR_BUFFER_SIZE`). Torch 2.13 keeps one for gloo
too; where there is none, nothing is known.

Only numbers are compared between ranks. Whether a collective is complete, a recorder learns late,
or never; and of what was sent from rank to rank, gloo records nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from outlast.system.units import listed

_NAMED = 3
_TYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64"}
_TYPES |= {"Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")  # as JSON, a full ring takes 45 ms, and so 20


def process_groups() -> dict[str, str]:
    """The process groups that this rank is in: how to call them, by name."""
    if not dist.is_available():
        return {}
    found: dict[str, str] = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        name, description = group.group_name, group.group_desc
        called = name if description in ("", "undefined") else repr(description)
        found[name] = "the default group" if description == "default_pg" else f"group {called}"
    return found


def begun(
    groups: Mapping[str, str], since_ns: int, until_ns: int, line: str
) -> dict[str, dict[str, Any]]:
    """What this rank has begun in each of these groups between two times (as `time.time_ns()`). It
    is at this `line` of the user.

    Returns:
        By the name of the group, its `label` from `groups`; the `number` of the last collective,
        counted from 1, or 0; its `call` (`all_reduce of float32 [3, 4]`, with the line if it is the
        last); and whether it is the `last` of all groups. Groups of which the recorder may have
        lost it are missing.
    """
    found: dict[str, dict[str, Any]] = {}
    if not groups:
        return found
    entries = sorted(_entries(), key=itemgetter("time_created_ns"))
    for entry in reversed(entries):
        name, since = entry["process_group"][0], entry["time_created_ns"]
        if since < since_ns or len(found) == len(groups):
            break
        if since <= until_ns and name in groups and name not in found and not entry["is_p2p"]:
            number, last = entry["collective_seq_id"], not found
            call = f"{_call(entry)} at {line}" if last and line else _call(entry)
            found[name] = {"label": groups[name], "number": number, "call": call, "last": last}
    if entries and (entries[0]["time_created_ns"] < since_ns or entries[0]["record_id"] == 0):
        for name, label in groups.items():  # the recorder has lost none of this time
            found.setdefault(name, {"label": label, "number": 0, "call": "", "last": False})
    return found


def _entries() -> Iterator[dict[str, Any]]:
    for name in _DUMPS:
        if dump := getattr(torch._C._distributed_c10d, name, None):
            # The bytes were made by torch just now, in this process.
            yield from pickle.loads(dump(True, False, False)).get("entries", ())


def _call(entry: dict[str, Any]) -> str:
    """`all_reduce of float32 [3, 4]`."""
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    shapes = [f"{_TYPES.get(kind, kind.lower())} {list(size)}" for kind, size in tensors]
    return f"{operation} of {listed(shapes, _NAMED)}" if shapes else operation

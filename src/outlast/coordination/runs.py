"""Sequences as runs: what all members read must not grow with their number.

In a job of any size, members and ranks mostly count up, and most other values are equal. So the
list of 16,384 ranks is one run, `[0, 16384, 1]`: the first value, how many, and the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def pack(values: Iterable[Any]) -> list[list[Any]]:
    """`values` as runs. A run of numbers may count up by one; otherwise its values are equal."""
    runs: list[list[Any]] = []
    for value in values:
        if runs:
            first, count, step = runs[-1]
            countable = type(first) is type(value) is int
            if count == 1 and countable and value == first + 1:
                runs[-1] = [first, 2, 1]
                continue
            if value == (first + count * step if countable else first) and (
                type(value) is type(first)
            ):
                runs[-1][1] += 1
                continue
        runs.append([value, 1, 0])
    return runs


def unpack(runs: Iterable[list[Any]]) -> list[Any]:
    """The inverse of `pack`."""
    values: list[Any] = []
    for first, count, step in runs:
        values += range(first, first + count) if step else [first] * count
    return values


def pack_records(records: list[dict[str, Any]]) -> bytes:
    """Records with the same names, as one line of JSON with a sequence of runs for each name."""
    names = sorted({name for record in records for name in record})
    columns = {name: pack(record.get(name) for record in records) for name in names}
    return json.dumps(columns, separators=(",", ":")).encode()


def unpack_records(data: bytes) -> list[dict[str, Any]]:
    """The inverse of `pack_records`."""
    columns = {name: unpack(runs) for name, runs in json.loads(data).items()}
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]

"""Delta debugging (ddmin): the smallest part of a list of faults that still makes a round fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shorten(items: Sequence[T], fails: Callable[[list[T]], bool], most_runs: int) -> list[T]:
    """Returns a part of `items`, in their order, for which `fails` is true: if `most_runs` suffice,
    one of which no single item can be left out.

    Args:
        items: all of them together are known to fail.
        fails: whether these items fail. It should always answer the same for the same items; each
            part is tried only once.
        most_runs: how often `fails` may be called.
    """
    current = list(range(len(items)))
    tried: dict[tuple[int, ...], bool] = {}

    def still_fails(part: list[int]) -> bool:
        key = tuple(part)
        if key not in tried:
            if len(tried) >= most_runs:
                return False
            tried[key] = fails([items[index] for index in part])
        return tried[key]

    parts = 2
    while len(current) >= 2:
        size = -(-len(current) // parts)
        chunks = [current[start : start + size] for start in range(0, len(current), size)]
        without = [[i for i in current if i not in chunk] for chunk in chunks]
        # With two chunks, each is the complement of the other.
        candidates = without if len(chunks) == 2 else [*chunks, *without]
        smaller = next((part for part in candidates if part and still_fails(part)), None)
        if smaller is not None:
            parts = 2 if len(smaller) <= size else max(parts - 1, 2)
            current = smaller
        elif parts >= len(current):
            break
        else:
            parts = min(2 * parts, len(current))
    return [items[index] for index in current]

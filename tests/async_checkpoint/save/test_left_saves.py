"""Which saves are completed after a restart: by what each rank has of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from outlast.async_checkpoint.save.left_saves import LeftSave, compared

WHOLE = LeftSave("a", 40, "after 3 batches", 7, 0.5, is_whole=True, is_committed=False)


def part(**changes: Any) -> list[dict[str, Any]]:
    return [dataclasses.asdict(dataclasses.replace(WHOLE, **changes))]


CASES: dict[str, tuple[list[list[dict[str, Any]]], list[bool]]] = {
    "on all ranks": ([part(), part()], [True]),
    "a rank has given no metric": ([part(metric=None), part()], [True]),
    "no rank has given one": ([part(metric=None), part(metric=None)], []),
    "a rank does not know of it": ([part(), []], [False]),
    "a rank has no snapshot": ([part(), part(is_whole=False)], [False]),
    "a rank knows that it is committed": ([part(), part(is_committed=True)], []),
    "another step on a rank": ([part(), part(step=38)], []),
    "another place on a rank": ([part(), part(place="after 4 batches")], []),
    "saves of two checkpointers": ([part(), part(save_id="b", number=3)], [False, False]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_can_be_completed(case: str) -> None:
    parts, expected = CASES[case]
    found = compared(parts, lambda step, save_id: False)
    assert [each.is_whole for each in found] == expected
    assert all(each.metric == 0.5 for each in found)
    assert [each.number for each in found] == sorted(each.number for each in found)


def test_what_is_on_storage_is_not_completed() -> None:
    asked = []

    def is_committed(step: int, save_id: str) -> bool:
        asked.append((step, save_id))
        return True

    assert compared([part(), part()], is_committed) == []
    assert asked == [(40, "a")]

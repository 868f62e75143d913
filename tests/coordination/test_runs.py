"""Sequences as runs: any sequence survives, and what counts up is small."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outlast.coordination.records import pack, pack_records, unpack, unpack_records

VALUES = st.one_of(st.none(), st.integers(-3, 3), st.booleans(), st.text(max_size=2))


@given(st.lists(VALUES))
def test_a_sequence_is_the_same_afterwards(values: list[Any]) -> None:
    unpacked = unpack(pack(values))
    assert unpacked == values
    assert [type(value) for value in unpacked] == [type(value) for value in values]


def test_what_counts_up_or_stays_equal_is_one_run() -> None:
    assert pack(range(5, 20_000)) == [[5, 19_995, 1]]
    assert pack([7] * 9) == [[7, 9, 0]]
    assert pack([0, 1, None, None, 4, 5]) == [[0, 2, 1], [None, 2, 0], [4, 2, 1]]


@given(st.lists(st.tuples(st.integers(0, 3), VALUES)))
def test_records_are_the_same_afterwards(rows: list[tuple[int, Any]]) -> None:
    records = [{"member": member, "said": said} for member, said in rows]
    assert unpack_records(pack_records(records)) == records


def test_the_records_of_many_ranks_are_small() -> None:
    records = [{"member": n, "rank": n, "world_size": 16_384} for n in range(16_384)]
    assert len(pack_records(records)) < 100

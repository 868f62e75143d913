"""What a rank has begun in its process groups, from the entries of torch's flight recorder."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.inprocess.interruption import flight_recorder

GROUPS = {"0": "the default group", "1": "group 'tp'"}


def entry(record: int, time: int, group: str = "0", number: int = 1, **more: Any) -> dict[str, Any]:
    values = {
        "record_id": record,
        "time_created_ns": time,
        "process_group": [group, "any"],
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": "nccl:all_gather",
        "input_dtypes": ["Float", "BFloat16", "Long", "Long"],
        "input_sizes": [[2], [3, 4], [], [5]],
    }
    return values | more


def begun(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(flight_recorder, "_entries", lambda: iter(entries))
    return flight_recorder.begun(GROUPS, 10, 20, "train.py:7 in step")


def test_the_last_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = entry(4, 14, is_p2p=True, number=9)
    found = begun(monkeypatch, entry(0, 11), entry(3, 13, number=2), entry(1, 12, "1"), sent)
    call = "all_gather of float32 [2], bfloat16 [3, 4], int64 [] and 1 more"
    assert found == {
        "0": {
            "label": "the default group",
            "number": 2,
            "call": f"{call} at train.py:7 in step",
            "last": True,
        },
        "1": found["0"] | {"label": "group 'tp'", "number": 1, "call": call, "last": False},
    }


@pytest.mark.parametrize("first", [entry(7, 9, number=5), entry(0, 12, "other")])
def test_a_group_that_has_begun_nothing(
    monkeypatch: pytest.MonkeyPatch, first: dict[str, Any]
) -> None:
    """The entries of a group with the same name in an earlier iteration, or of a later time, are
    not its own.
    """
    found = begun(monkeypatch, first, entry(8, 21, number=6))
    assert {name: each["number"] for name, each in found.items()} == {"0": 0, "1": 0}


def test_what_the_recorder_may_have_lost_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(begun(monkeypatch, entry(7, 12, number=5))) == ["0"]
    assert begun(monkeypatch) == {}

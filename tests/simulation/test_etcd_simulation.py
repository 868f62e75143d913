"""The store on etcd under thousands of schedules of lost answers, late requests, expired leases and
compactions; and under mutations of its code, each of which the simulation must detect.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from inprocess.mutations import mutate
from outlast.coordination.stores.etcd import operations
from outlast.coordination.stores.etcd.operations import Operations
from outlast.coordination.stores.etcd.watch import Waits
from simulation.etcd.simulation import simulate_etcd

SEEDS = 10_000
_CHUNK = 500


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(_CHUNK, SEEDS // 4, _CHUNK)),
        *(
            pytest.param(n, marks=[pytest.mark.slow, pytest.mark.exhaustive])
            for n in range(SEEDS // 4, SEEDS, _CHUNK)
        ),
    ],
)
def test_no_schedule_breaks_what_must_always_hold(first: int) -> None:
    runs = [simulate_etcd(seed) for seed in range(first, first + _CHUNK)]
    # The schedules are varied: operations of every kind that return, and that fail.
    done = Counter((o.name, o.ended >= 0) for run in runs for o in run.done)
    kinds = {name for name, _ in done}
    assert len(kinds) == 11
    assert all(done[name, True] > _CHUNK / 4 and done[name, False] for name in kinds), done


def test_the_same_seed_gives_the_same_run() -> None:
    for seed in range(30):
        assert simulate_etcd(seed).trace == simulate_etcd(seed).trace


_FENCED = """\
        conditions.append(layout.present(fence.host_key))
    body = layout.transaction(
        conditions,
        [layout.put(slot.key, name.encode(), fence.lease), *work],
"""
_UNCHANGED = """\
                layout.unchanged_since(base, base + b"\\0", revision),
                layout.unchanged_since(entries, end, revision),
"""
_NOT_FENCED = _FENCED.replace("conditions.append", "id").replace("fence.lease", "0")

MUTATIONS: dict[str, list[tuple[Any, str, str]]] = {
    "a blind retry": [
        (Operations._write, "[layout.modified(slot.key, slot.revision)]", "[]"),
    ],
    "a claim without its condition": [
        (
            Operations._steps,
            "layout.nested(absent, [layout.put(base, value)])",
            "layout.nested([], [layout.put(base, value)])",
        ),
    ],
    "a host that is not fenced": [(Operations._write, _FENCED, _NOT_FENCED)],
    "the sum of an add whose answer was lost, as it is later": [
        (Operations._at, "if entry.modified <= revision", ""),
    ],
    "a deleted key as it is after the delete": [
        (Operations._result, "revision - 1", "revision"),
    ],
    "a replacement of a key that was deleted meanwhile": [
        (Operations._compare_set, "layout.created(base, found[0].created),", ""),
    ],
    "a replacement of a key that was written meanwhile": [
        (Operations._compare_set, _UNCHANGED, ""),
    ],
    "a replacement of a key that was appended to meanwhile": [
        (Operations._compare_set, _UNCHANGED.splitlines(keepends=True)[1], ""),
    ],
    "an entry without a base": [
        (Operations._steps, '[layout.put(base, b"")]', "[]"),
    ],
    "a key twice in a transaction": [
        (operations._transactions, " or again", ""),
    ],
    "a watch that does not see that a key has gone": [
        (Waits._dispatch, "self._present.add if written else self._present.discard", "id"),
    ],
    "a list of keys of before a compaction": [
        (Waits._canceled, "self._present = None", "pass"),
    ],
    "a wait that takes the empty base for the value": [
        (Waits._dispatch, " or None)", ")"),
    ],
    "a wait from a later revision than that of the read": [
        (Operations.wait_for, "after=revision", "after=revision + 1"),
    ],
    "a wait that forgets what the watch has seen before it": [
        (Waits._happened, "return next(", "return None and next("),
    ],
    "a wait that sleeps through a compaction": [
        (Waits._canceled, "self._end(self._waits)", "pass"),
    ],
}


_LATE = (  # found after many seconds
    "a list of keys of before a compaction",
    "a wait that forgets what the watch has seen before it",
)


@pytest.mark.parametrize(
    "what",
    [pytest.param(w, marks=[pytest.mark.slow] if w in _LATE else []) for w in MUTATIONS],
)
def test_the_simulation_detects(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for function, old, new in MUTATIONS[what]:
        mutate(monkeypatch, function, old, new)
    with pytest.raises(AssertionError, match=r"^seed [0-9]+: "):
        for seed in range(SEEDS):
            simulate_etcd(seed)

"""The checker of histories accepts what a store may answer, and finds what it may not."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from torture.hosts.linearizable import NEVER, Call, is_linearizable


def _put(value: str, begin: float, end: float = NEVER) -> Call:
    return Call("put", value, begin, end)


def _read(value: str | None, begin: float, end: float) -> Call:
    return Call("read", "", begin, end, value)


GOOD = {
    "a read during a write sees either": [_put("a", 0, 1), _put("b", 2, 5), _read("a", 3, 4)],
    "a write of unknown outcome, late": [_put("a", 0), _read(None, 1, 2), _read("a", 3, 4)],
    "a write of unknown outcome, never": [_put("a", 0), _read(None, 1, 2), _read(None, 3, 4)],
    "claims agree": [
        Call("claim", "a", 0, 3, "b"),
        Call("claim", "b", 1, 2, "b"),
        _read("b", 4, 5),
    ],
    "an addition of unknown outcome": [
        Call("add", "5", 0),
        Call("add", "1", 1, 2, "1"),
        Call("add", "1", 3, 4, "7"),
    ],
    "a wait sees what was deleted since": [
        _put("a", 0, 1),
        Call("delete", "", 2, 3),
        Call("wait_for", "", 0, 4, "a"),
    ],
}
BAD = {
    "a stale read": [_put("a", 0, 1), _put("b", 2, 3), _read("a", 4, 5)],
    "a lost write": [_put("a", 0, 1), _read(None, 2, 3)],
    "a value that goes back": [_put("a", 0), _read("a", 1, 2), _read(None, 3, 4)],
    "two winners of a claim": [Call("claim", "a", 0, 3, "a"), Call("claim", "b", 1, 2, "b")],
    "an append performed twice": [Call("append", "a", 0, 1), _read("aa", 2, 3)],
    "an addition performed twice": [Call("add", "1", 0, 1, "1"), Call("add", "1", 2, 3, "3")],
    "a value of nobody": [_read("x", 0, 1)],
    "a wait that ends for nothing": [Call("wait_for", "", 0, 1, None)],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_legal_history_is_accepted(name: str) -> None:
    assert is_linearizable(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_an_illegal_history_is_found(name: str) -> None:
    assert not is_linearizable(BAD[name])


def _by_hand(calls: list[Call]) -> bool:
    """The same by trying all orders of all sets."""
    known = [call for call in calls if call.known]
    unknown = [call for call in calls if not call.known]
    for size in range(len(unknown) + 1):
        for some in itertools.combinations(unknown, size):
            for order in itertools.permutations([*known, *some]):
                if _is_order(order):
                    return True
    return False


def _is_order(order: tuple[Call, ...]) -> bool:
    value: str | None = None
    for place, call in enumerate(order):
        if any(later.end < call.begin for later in order[place + 1 :]):
            return False
        value, result, possible = call.apply(value)
        if not possible or (call.known and result != call.result):
            return False
    return True


def test_random_short_histories_are_judged_as_by_trying_all_orders() -> None:
    random = Random(0)
    verdicts = []
    for _ in range(1500):
        calls = []
        for number in range(random.randint(2, 5)):
            name = random.choice(["put", "claim", "append", "delete", "read", "wait_for"])
            begin = random.random()
            end = NEVER if random.random() < 0.25 else begin + 0.6 * random.random()
            seen = random.choice([None, "v0;", "v1;", "v0;v1;", "v2;"])
            result = None if name in ("put", "append", "delete") else seen
            calls.append(Call(name, f"v{number};", begin, end, result))
        verdicts.append(is_linearizable(calls))
        assert verdicts[-1] == _by_hand(calls), calls
    assert 20 < sum(verdicts) < 1480

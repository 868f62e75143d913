"""Each check of a history finds a bad one made by hand, and accepts the good one beside it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from torture.hosts.history import History

A, B = "h1-a", "h2-b"


def _acts(group: str, host: str, *times: float) -> list[dict[str, Any]]:
    return [{"e": "acts", "g": group, "h": host, "t": t} for t in times]


def _put(
    group: str, host: str, begin: float, end: float, number: str = "1"
) -> list[dict[str, Any]]:
    call = {"e": "call", "n": number, "g": group, "h": host, "op": "put", "k": "k", "a": number}
    return [{**call, "t": begin}, {"e": "done", "n": number, "r": None, "t": end}]


def _lost(group: str, host: str, at: float, *, left: bool = False) -> list[dict[str, Any]]:
    return [{"e": "lost", "g": group, "h": host, "left": left, "t": at}]


def _violations(folder: Path, *events: list[dict[str, Any]]) -> list[str]:
    history = History(folder)
    for event in itertools.chain(*events):
        history.take(event)
    return history.violations()


@pytest.mark.parametrize(("begins", "allowed"), [(3.0, True), (1.5, False)])
def test_two_groups_that_act_at_a_time(tmp_path: Path, begins: float, allowed: bool) -> None:
    found = _violations(tmp_path, _acts("a", A, 1.0, 2.0), _acts("b", B, begins, 5.0))
    assert bool(found) != allowed


@pytest.mark.parametrize(("ends", "allowed"), [(3.0, True), (1.5, False)])
def test_a_write_is_performed_while_another_group_acts(
    tmp_path: Path, ends: float, allowed: bool
) -> None:
    found = _violations(tmp_path, _acts("a", A, 1.0, 2.0), _put("b", B, 1.2, ends))
    assert bool(found) != allowed


@pytest.mark.parametrize(
    ("lost", "allowed"),
    [
        (_lost("a", A, 2.5), True),
        (_lost("a", A, 1.5), False),
        (_lost("a", A, 1.5, left=True), True),
    ],
)
def test_a_host_acts_although_it_was_declared_lost(
    tmp_path: Path, lost: list[dict[str, Any]], allowed: bool
) -> None:
    assert bool(_violations(tmp_path, _acts("a", A, 1.0, 2.0), lost)) != allowed


@pytest.mark.parametrize(("begin", "allowed"), [(1.4, True), (1.6, False)])
def test_a_call_of_a_lost_host_is_performed(tmp_path: Path, begin: float, allowed: bool) -> None:
    found = _violations(tmp_path, _put("a", A, begin, 3.0), _lost("a", A, 1.5))
    assert bool(found) != allowed


def test_a_stale_read_of_a_key_of_one_group(tmp_path: Path) -> None:
    read = {"e": "call", "n": "2", "g": "a", "h": B, "op": "read", "k": "k", "a": "", "t": 3.0}
    answer = {"e": "done", "n": "2", "r": None, "t": 4.0}
    put = _put("a", A, 1.0, 2.0)
    assert _violations(tmp_path, put, [read, answer])
    assert not _violations(tmp_path, put, [read, {**answer, "r": "1"}])
    assert not _violations(tmp_path, put, [{**read, "g": "b"}, answer])

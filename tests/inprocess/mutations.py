"""Mutations of the code for one test, which prove that the tests can fail.

`mutate(monkeypatch, MembershipProtocol.finish, ">= members", ">= 1")` compiles the function from
its source with one text replaced, and replaces the real one until the test ends. It fails if the
text is not found, so that a mutation cannot silently have no effect.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest


def mutate(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str
) -> None:
    """Replaces `function` by a mutation of it."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in\n{source}"
    module = sys.modules[function.__module__]
    made: dict[str, Any] = {}
    code = compile(source.replace(old, new), f"<mutation of {function.__qualname__}>", "exec")
    exec(code, module.__dict__, made)
    path, _, name = function.__qualname__.rpartition(".")
    if path:
        monkeypatch.setattr(getattr(module, path), name, made[name])
        return
    for user in [
        m for m in sys.modules.values() if m.__name__.startswith(("outlast.", "simulation."))
    ]:
        if getattr(user, name, None) is function:  # even if imported by `from ... import`
            monkeypatch.setattr(user, name, made[name])


def simulation_finds(
    monkeypatch: pytest.MonkeyPatch,
    mutation: tuple[Callable[..., Any], str, str],
    simulate: Callable[[int], object],
    seeds: int,
) -> None:
    """Asserts that one of so many seeds fails with the mutation, with what replays it."""
    mutate(monkeypatch, *mutation)
    with pytest.raises(AssertionError, match=r"\nseed \d+: \w*Schedule\("):
        for seed in range(seeds):
            simulate(seed)

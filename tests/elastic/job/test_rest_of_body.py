"""What stands behind `job.step()` in the body of its loop, found from the bytecode."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator

import pytest

from outlast.elastic.job.iteration import Rest, rest_after

found: list[Rest] = []
seen: list[int] = []
best = {"value": 0}


def step(*_: int) -> None:
    found.append(rest_after(sys._getframe(1), "job.step()"))


def effect(number: int) -> None:
    seen.append(number)


def last_in_the_body() -> None:
    for i in range(2):
        step(i)


def before_a_break() -> None:
    for i in itertools.count():
        step()
        if i == 1:
            break
    effect(1)


def before_a_counter() -> None:
    i = 0
    while len(seen) + i < 2:
        step(
            i,
            i,
        )
        i += 1
    effect(i)


def before_a_sum() -> None:
    total = 0
    for i in range(2):
        step()
        total += i


def in_a_condition() -> None:
    for i in range(4):
        if i % 2:
            step()
        else:
            effect(i)


def in_a_block() -> None:
    for _ in range(2):
        with contextlib.nullcontext():
            step()


def in_a_try() -> None:
    for i in range(2):
        try:
            step()
        except ValueError:
            effect(i)


def helper(i: int) -> int:
    step()
    return i


def in_a_function() -> None:
    for i in range(2):
        helper(i)


def in_the_inner_loop() -> None:
    for i in range(2):
        for _ in range(2):
            step()
        effect(i)


def before_a_call() -> None:
    for i in range(2):
        step()
        effect(i)


def before_a_call_in_the_line() -> None:
    for i in range(2):
        step(); effect(i)  # fmt: skip # noqa: E702


def before_a_condition() -> None:
    for i in range(2):
        step()
        if i == 5:
            effect(i)


def before_an_item() -> None:
    for i in range(2):
        step()
        best["value"] = i


def before_the_rest_of_a_block() -> None:
    for i in range(2):
        with contextlib.nullcontext():
            step()
        effect(i)


def before_a_finally() -> None:
    for i in range(2):
        try:
            step()
        finally:
            effect(i)


def before_a_loop() -> None:
    for i in range(2):
        step()
        for j in range(i):
            effect(j)


def in_a_function_before_a_call() -> None:
    for i in range(2):
        j = helper(i)
        effect(j)


def yielding() -> Iterator[int]:
    for i in range(2):
        step()
        yield i


def in_a_generator() -> None:
    for i in yielding():
        effect(i)


@pytest.mark.parametrize(
    "loop",
    [
        last_in_the_body,
        before_a_break,
        before_a_counter,
        before_a_sum,
        in_a_condition,
        in_a_block,
        in_a_try,
        in_a_function,
        in_the_inner_loop,
    ],
)
def test_nothing_stands_behind_it(loop: Callable[[], None]) -> None:
    found.clear()
    loop()
    assert {each.place for each in found} == {""}
    # Only where nothing at all is run, not even the end of a block, there is nothing to compare.
    quiet = {last_in_the_body, before_a_break, in_a_condition, in_a_try, in_the_inner_loop}
    assert [each.loop is not None for each in found] == [loop in quiet] * len(found)


@pytest.mark.parametrize(
    "loop",
    [
        before_a_call,
        before_a_call_in_the_line,
        before_a_condition,
        before_an_item,
        before_the_rest_of_a_block,
        before_a_finally,
        before_a_loop,
        in_a_function_before_a_call,
        in_a_generator,
    ],
)
def test_something_stands_behind_it(loop: Callable[[], None]) -> None:
    found.clear()
    loop()
    code = (yielding if loop is in_a_generator else loop).__code__
    lines = {line for *_, line in code.co_lines()}
    for each in found:
        name, _, line = each.place.rpartition(":")
        assert name == "job.step() at test_rest_of_body.py"
        assert int(line) in lines
        assert each.loop is None

"""Runs threads of blocking code in every order of their store operations.

A thread is a function of a store. It is run again from its beginning for each new list of answers,
alone: so it must do the same whenever it gets the same answers, and must share nothing with other
threads but the store. In return, a state of the run is a value: two orders that lead to the same
one are continued once, and all orders of some dozens of operations can be visited.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from outlast.coordination.ops import Op, perform_on
from outlast.coordination.stores.store import KeyTimeout, MemoryStore, Store

EXPIRED = "it took too long"
"""The answer to a wait that is over."""


class _Stopped(BaseException):
    """Leaves the code of a thread at an operation that has no answer yet."""


class _Answers(Store):
    """The store that a thread sees."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.op: Op | None = None  # the first that has no answer
        self._answers = iter(answers)

    def _ask(self, op: Op) -> Any:
        if self.op is None:
            for answer in self._answers:
                if answer is EXPIRED:
                    raise KeyTimeout(op.key)
                return answer
            self.op = op
        raise _Stopped

    def put(self, key: str, value: bytes) -> None:
        self._ask(Op("put", key, value))

    def claim(self, key: str, value: bytes) -> Any:
        return self._ask(Op("claim", key, value))

    def read(self, key: str) -> Any:
        return self._ask(Op("read", key))

    def wait_for(self, key: str, timeout: float | None) -> Any:
        return self._ask(Op("wait_for", key, timeout=timeout))

    def add(self, key: str, amount: int) -> Any:
        return self._ask(Op("add", key, amount=amount))

    def append(self, key: str, value: bytes) -> None:
        self._ask(Op("append", key, value))

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._ask(Op("delete", key))


class Thread:
    """A thread of a process. One that waits for `started_by` has not been started."""

    def __init__(
        self, name: str, process: int, code: Callable[[Any], Any], started_by: str = ""
    ) -> None:
        self.name, self.process, self.started_by = name, process, started_by
        self._code = code
        self.start = Point(self, ())

    def run(self, answers: tuple[Any, ...]) -> tuple[Op | None, Any]:
        store = _Answers(answers)
        try:
            value = self._code(store)
        except _Stopped:
            return store.op, None
        except Exception as e:
            raise AssertionError(f"{self.name} raised {e!r}") from e
        return None, value


class Point:
    """A point of a thread: before its operation `op`, or at its end, with its `value`."""

    def __init__(self, thread: Thread, answers: tuple[Any, ...]) -> None:
        self.thread, self._answers = thread, answers
        self.op, self.value = thread.run(answers)
        self._next: dict[Any, Point] = {}

    def after(self, answer: Any) -> Point:
        point = self._next.get(answer)
        if point is None:
            point = self._next[answer] = Point(self.thread, (*self._answers, answer))
        return point


class State(NamedTuple):
    """A state of the run: `None` is a thread of a process that has died."""

    table: frozenset[tuple[str, bytes]]
    points: tuple[Point | None, ...]
    deaths: int  # that may still happen
    early: int  # waits that may still end although others can go on


class Explorer:
    """All runs of some threads. `watch` is called before every operation, with the table as it is
    then; `finish` at the end of a run, with its last state. Both raise `AssertionError`.
    """

    def __init__(
        self,
        threads: Sequence[Thread],
        watch: Callable[[dict[str, bytes], Op], None],
        finish: Callable[[State, bool], None],
        *,
        deaths: int = 0,
        early: int = 0,
        table: dict[str, bytes] | None = None,
    ) -> None:
        points = tuple(thread.start for thread in threads)
        self._first = State(frozenset((table or {}).items()), points, deaths, early)
        self._watch, self._finish = watch, finish
        self._store = MemoryStore()
        self._perform = perform_on(self._store)

    def visit_all(self) -> int:
        """Visits every state; returns how many there are."""
        first = (self._first, False)
        came: dict[Any, tuple[Any, str] | None] = {first: None}  # from where, and how
        left = [first]
        while left:
            state, waited = at = left.pop()
            try:
                steps = [(step, make()) for step, make in self._steps(state)]
                if not steps:
                    self._finish(state, waited)
            except AssertionError as e:
                path = []
                while (before := came[at]) is not None:
                    at = before[0]
                    path.append(before[1])
                raise AssertionError("\n".join([str(e), *reversed(path)])) from e
            for step, following in steps:
                reached = following, waited or step.endswith(EXPIRED)
                if reached not in came:
                    came[reached] = at, step
                    left.append(reached)
        return len(came)

    def follow(self, seed: int) -> None:
        """Follows one path, which the seed chooses."""
        chance = random.Random(seed)
        state, waited, path = self._first, False, [f"seed {seed}"]
        try:
            while steps := list(self._steps(state)):
                step, make = chance.choice(steps)
                waited = waited or step.endswith(EXPIRED)
                path.append(step)
                state = make()
            self._finish(state, waited)
        except AssertionError as e:
            raise AssertionError("\n".join([str(e), *path])) from e

    def _steps(self, state: State) -> Iterator[tuple[str, Callable[[], State]]]:
        """What can happen next, and a function for each that returns the state after it."""
        table = dict(state.table)
        waiting = []
        can_go_on = False
        for number, point in enumerate(state.points):
            if point is None or point.op is None:
                continue
            op, name = point.op, point.thread.name
            if op.name == "wait_for" and op.key not in table:
                if op.timeout is not None:
                    waiting.append((number, f"{name} {op.key}: {EXPIRED}"))
                continue
            can_go_on = True
            self._watch(table, op)
            yield f"{name} {op.name} {op.key}", partial(self._performed, state, number)
        for number, step in waiting:
            if not can_go_on or state.early:
                left = state._replace(early=state.early - can_go_on)
                yield step, partial(self._answered, left, number, EXPIRED)
        if state.deaths and can_go_on:
            for process in sorted({p.thread.process for p in state.points if p is not None}):
                yield f"{process} dies", partial(self._without, state, process)

    def _performed(self, state: State, number: int) -> State:
        point = state.points[number]
        assert point is not None
        assert point.op is not None
        self._store.table = dict(state.table)
        answer = self._perform(point.op)
        after = state._replace(table=frozenset(self._store.table.items()))
        return self._answered(after, number, answer)

    def _answered(self, state: State, number: int, answer: Any) -> State:
        point = state.points[number]
        assert point is not None
        points = (*state.points[:number], point.after(answer), *state.points[number + 1 :])
        return state._replace(points=points)

    def _without(self, state: State, process: int) -> State:
        points = [None if p is None or p.thread.process == process else p for p in state.points]
        return state._replace(points=tuple(points), deaths=state.deaths - 1)

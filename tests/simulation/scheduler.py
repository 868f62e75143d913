"""The scheduler of the simulation: many tasks in one process, interleaved by a seed.

A `Simulation` drives coroutines (see `coordination/ops.py`) against one table and a fake clock. At
each step its seeded generator picks one task that can continue; the simulation performs the
operation that the task has yielded, and runs the task to its next operation. Between any two
operations a task may be stopped for good (`kill`). Time moves only when no task can continue: then
the earliest deadline of a waiting task expires. The same seed gives the same run.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from fake_clock import FakeClock
from outlast.coordination.ops import Op, perform_on
from outlast.coordination.stores.store import KeyTimeout, MemoryStore, Store

_POLLED = "gone/"
"""Waits for these keys may expire at any time: training goes on meanwhile, and its steps take time.
"""
_STORE_OPS = frozenset(name for name in vars(Store) if not name.startswith("_"))


class Deadlock(AssertionError):
    """No task can continue, and none waits for a deadline; or the step limit is reached."""


@dataclass(eq=False)
class Task:
    """One simulated flow of control."""

    name: str
    coroutine: Coroutine[Any, Any, Any]
    op: Op | None = None  # that it has yielded; `None` when it has ended
    deadline: float | None = None  # of its wait, in simulated seconds; `None` for never
    error: BaseException | None = None
    value: Any = None
    slow: int = 1  # how many times less often than other tasks it is picked
    killed: bool = False
    cut_off: bool = False  # no operation of the store is performed for it, and no wait expires
    on_end: Callable[[Task], None] | None = field(default=None, repr=False)

    @property
    def ended(self) -> bool:
        return self.op is None


class Simulation:
    """A seeded scheduler. `trace` lists the steps, `timeouts` the waits that expired.

    A coroutine may yield operations that are not the store's. `choose` returns a function that
    performs such an operation now, or `None` while it cannot continue.
    """

    def __init__(self, seed: int, choose: Callable[[Task, Op], Callable[[], Any] | None]) -> None:
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.store = MemoryStore()
        self.tasks: list[Task] = []
        self.trace: list[str] = []
        self.timeouts: list[tuple[Task, str]] = []
        self.steps = 0
        self._choose = choose
        self._perform = perform_on(self.store)

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, Any], **options: Any) -> Task:
        """Adds a task, and runs it up to its first operation."""
        task = Task(name, coroutine, **options)
        self.add(task)
        return task

    def add(self, task: Task) -> None:
        self.tasks.append(task)
        self._resume(task, None, None)

    def kill(self, task: Task) -> None:
        """Stops a task between two operations, for good."""
        self.trace.append(f"{self.steps}: {task.name} killed")
        task.killed, task.op = True, None
        self.tasks.remove(task)
        task.coroutine.close()

    def run(self, max_steps: int = 20_000, each: Callable[[], None] | None = None) -> None:
        """Steps until all tasks have ended; `each` is called before every step.

        Raises:
            Deadlock: if that cannot happen, or takes more than `max_steps`.
        """
        while self.tasks:
            self.steps += 1
            if self.steps > max_steps:
                raise Deadlock(f"still running after {max_steps} steps: {self._where()}")
            if each is not None:
                each()
            if self.tasks:
                self._step()

    def _step(self) -> None:
        ready: list[Task] = []
        chances: list[float] = []
        performers: dict[Task, Callable[[], Any]] = {}
        for task in self.tasks:
            op = task.op
            assert op is not None
            if task.cut_off and op.name in _STORE_OPS:
                continue
            if op.name == "wait_for":
                if op.key not in self.store.table:
                    if not op.key.startswith(_POLLED):
                        continue
                    performers[task] = functools.partial(_expire, op.key)
            elif op.name not in _STORE_OPS:
                perform = self._choose(task, op)
                if perform is None:
                    continue
                performers[task] = perform
            ready.append(task)
            chances.append(1.0 / task.slow)
        if not ready:
            self._let_time_pass()
            return
        [task] = self.random.choices(ready, chances)
        assert task.op is not None
        self.trace.append(f"{self.steps}: {task.name} {task.op.name} {task.op.key}")
        try:
            result = performers[task]() if task in performers else self._perform(task.op)
            error = None
        except Exception as e:  # noqa: BLE001 - raised in the task
            result, error = None, e
        self._resume(task, result, error)

    def _let_time_pass(self) -> None:
        waiting = [t for t in self.tasks if t.deadline is not None and not t.cut_off]
        if not waiting:
            raise Deadlock(f"no task can go on: {self._where()}")
        task = min(waiting, key=lambda t: t.deadline or 0.0)
        assert task.deadline is not None
        assert task.op is not None
        self.clock.advance(max(0.0, task.deadline - self.clock.now()))
        self.timeouts.append((task, task.op.key))
        self.trace.append(f"{self.steps}: {task.name} timed out on {task.op.key}")
        self._resume(task, None, KeyTimeout(task.op.key))

    def _resume(self, task: Task, result: Any, error: BaseException | None) -> None:
        try:
            op = task.coroutine.send(result) if error is None else task.coroutine.throw(error)
        except StopIteration as stop:
            task.value, task.op = stop.value, None
        except BaseException as e:  # noqa: BLE001 - how the task ended; the caller checks it
            task.error, task.op = e, None
        else:
            task.op = op
            task.deadline = None if op.timeout is None else self.clock.now() + op.timeout
        if task.ended:
            self.trace.append(f"{self.steps}: {task.name} ended {task.error!r}")
            self.tasks.remove(task)
            if task.on_end is not None:
                task.on_end(task)

    def _where(self) -> str:
        return "; ".join(f"{t.name} at {t.op.name} {t.op.key}" for t in self.tasks if t.op)


def _expire(key: str) -> None:
    raise KeyTimeout(key)

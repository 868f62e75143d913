"""After an interrupt, no lock of Python's library is held, and blocking calls are still woken."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import logging
import multiprocessing
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from outlast.errors import RankShouldRestart
from outlast.inprocess.interruption import deferral
from outlast.inprocess.interruption.interrupter import Interrupter

LIMIT_S = 60.0
"""What only a deadlock exceeds."""

Round = Callable[[], object]


@contextlib.contextmanager
def _queue(folder: Path) -> Iterator[Round]:
    items: queue.Queue[int] = queue.Queue()
    yield lambda: (items.put(1), items.get())


@contextlib.contextmanager
def _logging(folder: Path) -> Iterator[Round]:
    logger = logging.Logger("tight")
    handlers = [logging.StreamHandler(io.StringIO()), logging.FileHandler(folder / "log")]
    for handler in handlers:
        logger.addHandler(handler)
    yield lambda: logger.warning("step %d", 3)
    handlers[1].close()


@contextlib.contextmanager
def _condition(folder: Path) -> Iterator[Round]:
    condition, event = threading.Condition(), threading.Event()

    def once() -> None:
        with condition, condition:  # its lock is an RLock
            condition.notify_all()
            condition.wait(0)
        event.set()
        event.wait()
        event.clear()

    yield once


@contextlib.contextmanager
def _pool(folder: Path) -> Iterator[Round]:
    with ThreadPoolExecutor(2) as pool:
        yield lambda: pool.submit(int).result()


@contextlib.contextmanager
def _processes(folder: Path) -> Iterator[Round]:
    items: Any = multiprocessing.Queue()
    yield lambda: (items.put(1), items.get())
    items.close()
    items.join_thread()


@contextlib.contextmanager
def _imports(folder: Path) -> Iterator[Round]:
    (folder / "imported_again.py").write_text("value = [n for n in range(10)]\n")
    sys.path.insert(0, str(folder))

    def once() -> None:
        sys.modules.pop("imported_again", None)
        assert importlib.import_module("imported_again").value[9] == 9

    yield once
    sys.path.remove(str(folder))


@contextlib.contextmanager
def _asyncio(folder: Path) -> Iterator[Round]:
    async def main() -> None:
        lock = asyncio.Lock()
        async with lock:
            await asyncio.sleep(0)

    yield lambda: asyncio.run(main())


@contextlib.contextmanager
def _own_manager(folder: Path) -> Iterator[Round]:
    lock = threading.Lock()

    class Holds:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.release()

        def release(self) -> None:
            lock.release()

    def once() -> None:
        with Holds():
            pass

    yield once


@contextlib.contextmanager
def _tqdm(folder: Path) -> Iterator[Round]:
    tqdm, shown = pytest.importorskip("tqdm").tqdm, io.StringIO()
    before, tqdm.monitor_interval = tqdm.monitor_interval, 0  # without its thread
    yield lambda: [-n for n in tqdm(range(3), file=shown, mininterval=0)]
    tqdm.monitor_interval = before


LOOPS = (
    *(_queue, _logging, _condition, _pool, _processes, _imports, _asyncio, _own_manager),
    _tqdm,
)


def forever(once: Round) -> None:
    while True:
        once()


def interrupt_after(interrupter: Interrupter, seconds: float, left: threading.Event) -> None:
    """What the monitor thread does."""
    time.sleep(seconds)
    while not left.is_set():
        interrupter.request()
        left.wait(0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    "times", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.exhaustive])]
)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.filterwarnings("error")
def test_a_tight_loop_can_be_entered_again_after_each_restart(
    loop: Callable[[Path], contextlib.AbstractContextManager[Round]], times: int, tmp_path: Path
) -> None:
    interrupter, chosen = Interrupter(), random.Random(times)
    interrupter.install()
    try:
        with loop(tmp_path) as once:
            once()
            for _ in range(times):
                left = threading.Event()
                asked = interrupter, chosen.uniform(0.0, 0.003), left
                requester = threading.Thread(target=interrupt_after, args=asked)
                requester.start()
                value, error = interrupter.run(lambda: forever(once))
                left.set()
                requester.join()
                assert isinstance(error, RankShouldRestart), (value, error)
                assert not isinstance(error.__context__, Exception), error.__context__
                # Frees what the function had, as the wrapper does. If garbage collection did so
                # later, tqdm could not finalize a bar while it iterates over its bars.
                error.__traceback__ = None
                # In another thread: this one may take an RLock that it has kept.
                again = threading.Thread(target=once, daemon=True)
                again.start()
                again.join(LIMIT_S)
                assert not again.is_alive(), interrupter.landed
    finally:
        interrupter.restore()


class Blocked:
    """Blocks in a lock that another thread has, where no user's frame is the innermost one."""

    def __init__(self) -> None:
        self.logger, self.handler = logging.Logger("blocked"), logging.StreamHandler(io.StringIO())
        self.logger.addHandler(self.handler)
        self.locked, self.unlock = threading.Event(), threading.Event()
        self.holder = threading.Thread(target=self.hold)

    def hold(self) -> None:
        self.handler.acquire()
        self.locked.set()
        self.unlock.wait(LIMIT_S)
        self.handler.release()


def run_interrupted(interrupter: Interrupter, function: Round) -> BaseException | None:
    left = threading.Event()
    requester = threading.Thread(target=interrupt_after, args=(interrupter, 0.0, left))
    requester.start()
    _, error = interrupter.run(function)
    left.set()
    requester.join()
    return error


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    made = Interrupter()
    made.install()
    yield made
    made.restore()


def test_a_lock_that_another_thread_has_is_not_waited_for(interrupter: Interrupter) -> None:
    blocked = Blocked()
    blocked.holder.start()
    blocked.locked.wait()
    error = run_interrupted(interrupter, lambda: forever(lambda: blocked.logger.warning("x")))
    assert isinstance(error, RankShouldRestart)
    assert not blocked.unlock.is_set()  # it was interrupted, and did not get the lock
    blocked.unlock.set()
    blocked.holder.join()
    assert blocked.handler.lock is not None
    assert blocked.handler.lock.acquire(blocking=False)
    blocked.handler.release()


def test_a_loop_in_c_over_such_functions_ends_too(
    interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferral, "_PATIENCE_S", 0.2)  # this one may keep the lock
    items: queue.Queue[int] = queue.Queue()

    def endless() -> None:
        for _ in map(items.put, iter(int, 1)):
            pass

    assert isinstance(run_interrupted(interrupter, endless), RankShouldRestart)


def test_a_thread_that_gets_no_cpu_time_is_given_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(deferral.time, "monotonic", lambda: now)
    one = deferral.Deferral()

    class Manager:
        def __enter__(self) -> bool:
            return one.must_wait([sys._getframe()], in_handler=False)

    enter = Manager().__enter__
    one.begin()
    assert enter()
    now = 2.0
    assert enter()
    end = time.thread_time() + deferral._USED_S
    while time.thread_time() < end:
        pass
    assert not enter()


def test_a_call_that_returned_while_its_thread_did_not_run_is_not_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second request finds it where the first did, after the lock was acquired."""
    now = 0.0
    monkeypatch.setattr(deferral.time, "monotonic", lambda: now)

    class Manager:
        def __enter__(self) -> FrameType:
            return sys._getframe()

    one, frame = deferral.Deferral(), Manager().__enter__()

    def must_wait_when_requested() -> bool:
        one.requested()
        waits = one.must_wait([frame], in_handler=True)
        assert one.must_ask_again()
        return waits

    one.begin()
    assert must_wait_when_requested()
    now = 2 * deferral._BLOCKED_S
    assert must_wait_when_requested()
    assert not must_wait_when_requested()  # it is still there: it is blocked
    one.begin()
    assert must_wait_when_requested()
    now = 4 * deferral._BLOCKED_S
    assert must_wait_when_requested()
    assert one.must_wait([frame], in_handler=True)  # asked again: the call has returned
    assert must_wait_when_requested()


def test_the_users_code_that_a_library_calls_is_the_users(
    interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferral, "_PATIENCE_S", float("inf"))

    class Formats(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            while True:
                pass

    logger, handler = logging.Logger("formats"), logging.StreamHandler(io.StringIO())
    handler.setFormatter(Formats())
    logger.addHandler(handler)
    error = run_interrupted(interrupter, lambda: logger.warning("x"))
    assert isinstance(error, RankShouldRestart)
    assert handler.lock is not None
    assert not handler.lock._is_owned()  # type: ignore[attr-defined]

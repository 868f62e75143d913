"""The interrupt is raised in user code, wherever that is, and nowhere else."""

from __future__ import annotations

import _thread
import bdb
import builtins
import functools
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from outlast.errors import RankShouldRestart
from outlast.inprocess.interruption import deferral
from outlast.inprocess.interruption import interrupter as interrupter_module
from outlast.inprocess.interruption.interrupter import INTERRUPT_SIGNAL, AtomicSection, Interrupter


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    made = Interrupter()
    made.install()
    yield made
    made.restore()


@pytest.fixture
def without_signal() -> Interrupter:
    """Interrupts by asynchronous exception: the signal handler is not installed."""
    return Interrupter()


class Requester(threading.Thread):
    """Requests interrupts from the beginning of the function until it has been left."""

    def __init__(self, interrupter: Interrupter) -> None:
        super().__init__(daemon=True)
        self.interrupter = interrupter
        self.begin, self.left = threading.Event(), threading.Event()
        self.told: list[str] = []

    def run(self) -> None:
        self.begin.wait()
        while not self.left.is_set():
            self.told.append(self.interrupter.request())
            self.left.wait(0.01)

    def __enter__(self) -> Requester:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.begin.set()
        self.left.set()
        self.join()


def interrupted(interrupter: Interrupter, function: Callable[[], Any]) -> Requester:
    """Runs `function` until it is interrupted; fails if it ends in another way."""
    with Requester(interrupter) as requester:

        def begin() -> Any:
            requester.begin.set()
            return function()

        value, error = interrupter.run(begin)
    assert isinstance(error, RankShouldRestart)
    assert value is None
    return requester


def spin() -> None:
    while True:
        pass


def recurse(depth: int = 0) -> None:
    if depth < 100:
        recurse(depth + 1)
    for _ in iter(int, 1):
        sum(range(10))


def wait_for_an_event() -> None:
    threading.Event().wait()


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()  # not timed: CPython gives a signal its turn here too


BLOCKED = [
    spin,
    recurse,
    functools.partial(time.sleep, 1000),
    lambda: queue.SimpleQueue[int]().get(),
    lambda: queue.Queue[int]().get(),
    wait_for_an_event,
    wait_for_a_lock,
]


@pytest.mark.parametrize("function", BLOCKED)
def test_a_signal_wakes(interrupter: Interrupter, function: Callable[[], Any]) -> None:
    requester = interrupted(interrupter, function)
    assert set(requester.told) <= {"signal", "none"}
    assert interrupter.landed == 1


def test_a_signal_wakes_a_read_of_a_socket(interrupter: Interrupter) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        interrupted(interrupter, lambda: ours.recv(1))


def test_a_function_written_in_c_is_interrupted(interrupter: Interrupter) -> None:
    with Requester(interrupter) as requester:
        requester.begin.set()
        _, error = interrupter.run(functools.partial(time.sleep, 1000))
    assert isinstance(error, RankShouldRestart)


@pytest.mark.parametrize("function", [spin, recurse])
def test_an_asynchronous_exception_lands_in_python(
    without_signal: Interrupter, function: Callable[[], Any]
) -> None:
    requester = interrupted(without_signal, function)
    assert set(requester.told) <= {"async", "none"}
    assert without_signal.landed >= 1


def test_the_user_may_swallow_it_and_it_comes_again(interrupter: Interrupter) -> None:
    caught = 0

    def stubborn() -> None:
        nonlocal caught
        while caught < 5:
            try:
                time.sleep(1000)
            except BaseException:  # noqa: BLE001 - what users do
                caught += 1
        time.sleep(1000)

    interrupted(interrupter, stubborn)
    assert caught == 5
    assert interrupter.landed == 6


def test_it_tells_where_the_thread_is(interrupter: Interrupter) -> None:
    begun, asked = threading.Event(), threading.Event()
    places: list[str] = []

    def ask() -> None:
        begun.wait()
        places.append(interrupter.where())
        asked.set()

    thread = threading.Thread(target=ask)
    thread.start()

    def the_users_function() -> None:
        begun.set()
        asked.wait()

    interrupter.run(the_users_function)
    thread.join()
    assert "the_users_function" in places[0]
    assert "run" not in places[0].split()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_goes_on_through_an_interrupt(
    interrupter: Interrupter, ending: type[BaseException]
) -> None:
    def function() -> None:
        try:
            raise ending("leave")
        finally:
            raise RankShouldRestart("it lands in the clean-up")

    _, error = interrupter.run(function)
    assert type(error) is ending


def test_outside_a_call_nothing_is_asked_for(interrupter: Interrupter) -> None:
    assert interrupter.request() == "none"
    interrupter.run(lambda: None)
    assert interrupter.request() == "none"
    signal.raise_signal(INTERRUPT_SIGNAL)  # a late signal has no effect
    assert interrupter.landed == 0


def test_an_old_request_does_not_reach_the_next_call(interrupter: Interrupter) -> None:
    interrupted(interrupter, spin)
    value, error = interrupter.run(lambda: signal.raise_signal(INTERRUPT_SIGNAL) or 5)
    assert (value, error) == (5, None)


def test_what_the_function_raises_comes_back(interrupter: Interrupter) -> None:
    for raised in (ValueError("mine"), SystemExit(3), KeyboardInterrupt()):

        def fail(error: BaseException = raised) -> None:
            raise error

        assert interrupter.run(fail) == (None, raised)


# -- handlers ------------------------------------------------------------------------------


def test_the_handler_is_there_between_install_and_restore() -> None:
    before = signal.getsignal(INTERRUPT_SIGNAL)
    made = Interrupter()
    assert not made.by_signal
    made.install()
    assert made.by_signal
    made.restore()
    assert signal.getsignal(INTERRUPT_SIGNAL) is before
    made.restore()  # a second call has no effect
    assert signal.getsignal(INTERRUPT_SIGNAL) is before


def test_a_handler_of_the_users_is_left_alone() -> None:
    def mine(number: int, frame: FrameType | None) -> None: ...

    before = signal.signal(INTERRUPT_SIGNAL, mine)
    try:
        made = Interrupter()
        made.install()
        assert not made.by_signal
        assert set(interrupted(made, spin).told) <= {"async", "none"}
        made.restore()
        assert signal.getsignal(INTERRUPT_SIGNAL) is mine
    finally:
        signal.signal(INTERRUPT_SIGNAL, before)


def test_a_signal_that_the_user_takes_in_the_function_stays_the_users(
    interrupter: Interrupter,
) -> None:
    def mine(number: int, frame: FrameType | None) -> None: ...

    try:

        def take() -> None:
            signal.signal(INTERRUPT_SIGNAL, mine)
            spin()

        requester = interrupted(interrupter, take)
        assert requester.told[-1] in ("async", "none")
        interrupter.restore()
        assert signal.getsignal(INTERRUPT_SIGNAL) is mine
    finally:
        signal.signal(INTERRUPT_SIGNAL, signal.SIG_DFL)


def test_in_another_thread_it_goes_without_a_signal() -> None:
    told: list[str] = []

    def work() -> None:
        made = Interrupter()
        made.install()
        assert not made.by_signal
        told.extend(interrupted(made, spin).told)
        made.restore()

    before = signal.getsignal(INTERRUPT_SIGNAL)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "async" in told
    assert set(told) <= {"async", "none"}
    assert signal.getsignal(INTERRUPT_SIGNAL) is before


# -- every interleaving with the library's own code -----------------------------------------
#
# A request is made exactly at the n-th bytecode of the library's code, for every n. Where Python
# would run the signal handler, the tracer runs it with the traced frame; its exception is raised
# there, as is an asynchronous exception that is set while the tracer runs.


class At:
    """Traces the bytecodes of some functions of this thread; calls `act` at the n-th."""

    def __init__(self, codes: set[CodeType], n: int, act: Callable[[FrameType], None]) -> None:
        self.codes, self.left, self.act = codes, n, act
        self.reached: str | None = None

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code not in self.codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                self.reached = f"{frame.f_code.co_name}:{frame.f_lineno}"
                self.act(frame)
        return self.trace

    def end(self) -> None:
        """After the traced call."""


LIBRARY = {
    Interrupter.run.__code__,
    interrupter_module.user_region.__code__,
    Interrupter._let_requests_land.__code__,
    Interrupter.shield.__code__,
    Interrupter.unshield.__code__,
    AtomicSection.__enter__.__code__,
    AtomicSection.__exit__.__code__,
}


class Told:
    """What an interrupted function observed of the library."""

    def __init__(self) -> None:
        self.inside = self.after = 0


def user(atomic: AtomicSection, told: Told) -> str:
    """Enters two nested atomic blocks, and records where it has been."""
    with atomic:
        told.inside += 1
        with atomic:
            told.inside += 1
        told.after += 1
    return "done"


def check_after(
    interrupter: Interrupter, atomic: AtomicSection, told: Told, where: str | None
) -> None:
    """Checks that no state of the library is half updated."""
    assert interrupter._shields == 0, where
    assert atomic._depth == 0, where
    assert atomic._changed.acquire(blocking=False), where  # the lock is free
    atomic._changed.release()
    assert told.inside in (0, 2), where  # an atomic block runs to its end or not at all
    assert told.after == told.inside / 2, where
    # The next call is not affected.
    assert interrupter.run(lambda: user(atomic, Told())) == ("done", None), where


def interleavings(act: Callable[[int, Interrupter, AtomicSection, Told], At]) -> int:
    """Tries n = 1, 2, ... until the call ends before its n-th bytecode."""
    n, landed = 0, 0
    while True:
        n += 1
        interrupter = Interrupter()
        atomic, told = AtomicSection(interrupter), Told()
        at = act(n, interrupter, atomic, told)
        function = functools.partial(user, atomic, told)
        before = sys.gettrace()
        sys.settrace(at.trace)
        try:
            value, error = interrupter.run(function)
        finally:
            sys.settrace(before)
        at.end()
        if error is None:
            assert value == "done"
        else:
            assert isinstance(error, RankShouldRestart), at.reached
            landed += 1
        check_after(interrupter, atomic, told, at.reached)
        if at.reached is None:
            assert n > 150  # the code was traced
            return landed


def test_a_signal_at_any_bytecode_of_the_library() -> None:
    def act(n: int, interrupter: Interrupter, atomic: AtomicSection, told: Told) -> At:
        def handle(frame: FrameType) -> None:
            if interrupter._inside:  # as `request` does
                interrupter._wanted = True
            interrupter._handle(INTERRUPT_SIGNAL, frame)

        return At(LIBRARY, n, handle)

    assert interleavings(act) > 5


def test_an_asynchronous_exception_at_any_bytecode_of_the_library() -> None:
    def act(n: int, interrupter: Interrupter, atomic: AtomicSection, told: Told) -> At:
        def request(frame: FrameType) -> None:
            asked = _thread.allocate_lock()
            asked.acquire()
            _thread.start_new_thread(lambda: (interrupter.request(), asked.release()), ())
            asked.acquire()  # the exception is raised here, and propagates to the traced frame

        return At(LIBRARY, n, request)

    assert interleavings(act) > 5


@pytest.mark.slow
@pytest.mark.parametrize("later", [1, 2, 3, 5, 8, 13, 21, 34])
def test_a_requester_that_is_held_up_in_the_middle_of_its_request(
    later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It checks whether the thread is in user code at bytecode n, and raises at n + later, or once
    the thread waits for it.
    """
    sleep = time.sleep

    def act(n: int, interrupter: Interrupter, atomic: AtomicSection, told: Told) -> At:
        # Plain locks: where a thread waits in `threading`, an interrupt waits for it.
        looked, go_on, ended = (Flag() for _ in range(3))
        look = interrupter._still_inside

        def slow_look() -> bool:
            inside = look()
            looked.set()
            go_on.wait()
            return inside

        def yield_to_requester(seconds: float) -> None:
            go_on.set()
            sleep(0.0001)

        monkeypatch.setattr(interrupter, "_still_inside", slow_look)
        monkeypatch.setattr(interrupter_module.time, "sleep", yield_to_requester)

        def begin(frame: FrameType) -> None:
            def request() -> None:
                interrupter.request()
                looked.set()
                ended.set()

            _thread.start_new_thread(request, ())
            looked.wait()

            def end(frame: FrameType) -> None:
                go_on.set()
                ended.wait()

            at.left, at.act = later, end
            at.ended, at.go_on = ended, go_on  # type: ignore[attr-defined]

        at = HeldUp(LIBRARY, n, begin)
        return at

    assert interleavings(act) > 5


class Flag:
    """An event that one thread waits for, in no function of Python's library."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        if self._lock.locked():
            self._lock.release()

    def wait(self) -> None:
        with self._lock:  # it stays set
            pass


class HeldUp(At):
    """Lets the requester continue at the end, if it still waits."""

    ended: Flag | None = None
    go_on: Flag

    def end(self) -> None:
        if self.ended is not None:
            self.go_on.set()
            self.ended.wait()


def test_a_generator_that_dies_in_an_atomic_block_later_harms_nothing(
    interrupter: Interrupter,
) -> None:
    atomic = AtomicSection(interrupter)

    def generate() -> Iterator[int]:
        with atomic:
            yield 1

    held = generate()
    assert interrupter.run(lambda: next(held)) == (1, None)
    atomic.reset()
    interrupted(interrupter, spin)  # the next iteration is not shielded by it
    held.close()
    atomic.begin_termination()  # and it is not counted twice
    assert interrupter._shields == 0


def test_an_import_is_not_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interrupt arrives during the import of a package, and lands after it.
    (tmp_path / "slowly_imported.py").write_text(
        "import builtins, time\n"
        "builtins.request_amid_import()\n"
        "for _ in range(1000): pass\n"
        "done = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    interrupter = Interrupter()
    interrupter.install()
    monkeypatch.setattr(builtins, "request_amid_import", interrupter.request, raising=False)

    def function() -> None:
        import slowly_imported

        assert slowly_imported.done
        interrupter.request()
        while True:
            pass

    try:
        value, error = interrupter.run(function)
    finally:
        interrupter.restore()
        sys.modules.pop("slowly_imported", None)
    assert isinstance(error, RankShouldRestart), (value, error)
    assert interrupter.landed == 1


class Finalized:
    """Its finalizer lasts until `done`."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done, self.completed = done, threading.Event()

    def __del__(self) -> None:
        while not self.done():
            time.sleep(0.001)
        self.completed.set()


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python reports of finalizers."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    return told


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_finalizer_is_not_interrupted(unraisable: list[Any], by_signal: bool) -> None:
    interrupter = Interrupter()
    if by_signal:
        interrupter.install()
    completed: list[threading.Event] = []

    def function() -> None:
        # Requests are repeated every 10 ms: several come while it lasts.
        there = Finalized(lambda: len(requester.told) >= 4)
        completed.append(there.completed)
        requester.begin.set()
        del there
        spin()

    try:
        with Requester(interrupter) as requester:
            _, error = interrupter.run(function)
    finally:
        interrupter.restore()
    assert isinstance(error, RankShouldRestart)
    assert completed[0].is_set()
    assert unraisable == []


def test_a_finalizer_that_does_not_end_is_interrupted_without_a_report(
    unraisable: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferral, "_PATIENCE_S", 0.0)
    interrupter = Interrupter()
    interrupter.install()

    def function() -> None:
        there = Finalized(lambda: False)
        requester.begin.set()
        del there
        spin()

    try:
        with Requester(interrupter) as requester:
            _, error = interrupter.run(function)
        assert isinstance(error, RankShouldRestart)
        assert unraisable == []
        Finalized(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        assert [each.exc_type for each in unraisable] == [ZeroDivisionError]
    finally:
        interrupter.restore()
    assert sys.unraisablehook == unraisable.append


def test_a_debugger_is_recognized(interrupter: Interrupter) -> None:
    found: list[bool] = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame: FrameType) -> None:
            found.append(interrupter.in_debugger())

    def body() -> None:
        pass

    def function() -> None:
        found.append(interrupter.in_debugger())
        Debugger().runcall(body)

    before = sys.gettrace()
    try:
        interrupter.run(function)
    finally:
        sys.settrace(before)
    assert found[0] is False
    assert set(found[1:]) == {True}

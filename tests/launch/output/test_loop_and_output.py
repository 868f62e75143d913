"""The event loop and the non-blocking output, without a job."""

from __future__ import annotations

import os
import select
import selectors
import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.launch.event_loop import EventLoop
from outlast.launch.workers.output import (
    LINE_LIMIT,
    PENDING_LIMIT,
    Capture,
    Lines,
    Outlet,
    readable,
)

got: list[signal.Signals] = []


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    got.clear()
    with EventLoop((signal.SIGUSR1, signal.SIGHUP), got.append) as loop:
        yield loop


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            continue  # the test has closed it


def test_signals_are_handled_in_the_loop(loop: EventLoop) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert got == []
    loop.run_once()
    assert got == [signal.SIGUSR1]


def test_an_ignored_signal_stays_ignored() -> None:
    got.clear()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with EventLoop((signal.SIGUSR1, signal.SIGHUP), got.append) as loop:
            os.kill(os.getpid(), signal.SIGHUP)  # as under nohup
            os.kill(os.getpid(), signal.SIGUSR1)
            loop.run_once()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert got == [signal.SIGUSR1]


def test_a_loop_without_signals_runs_in_any_thread_and_takes_calls_from_others() -> None:
    threads: list[threading.Thread] = []
    started = threading.Event()

    def serve() -> None:
        with EventLoop(selector=selectors.EpollSelector()) as loop:
            loops.append(loop)
            started.set()
            while len(threads) < 2:
                loop.run_once()

    loops: list[EventLoop] = []
    service = threading.Thread(target=serve)
    service.start()
    started.wait()
    for _ in range(2):
        loops[0].call_from_thread(lambda: threads.append(threading.current_thread()))
    service.join()
    assert threads == [service, service]
    loops[0].call_from_thread(lambda: threads.append(threading.current_thread()))  # no effect


def test_timers_come_in_order_and_only_if_wanted(loop: EventLoop) -> None:
    said: list[str] = []
    loop.call_later(0.02, lambda: said.append("third"))
    loop.call_later(0.0, lambda: said.append("first"))
    loop.call_later(0.005, lambda: said.append("cancelled")).cancel()
    loop.call_later(0.01, lambda: said.append("second"))
    while len(said) < 3:
        loop.run_once()
    assert said == ["first", "second", "third"]


def test_a_callback_may_end_the_watch_of_another(loop: EventLoop) -> None:
    one, two = os.pipe(), os.pipe()
    said: list[int] = []

    def ends(mine: int, other: int) -> None:
        said.append(mine)
        loop.unwatch(other)
        loop.unwatch(mine)

    for mine, other in ((one, two), (two, one)):
        os.write(mine[1], b"x")
        loop.watch(mine[0], selectors.EVENT_READ, lambda a=mine[0], b=other[0]: ends(a, b))
    loop.run_once()
    assert len(said) == 1
    for fd in (*one, *two):
        os.close(fd)


@given(st.lists(st.binary(max_size=50)))
def test_lines_are_the_same_however_they_arrive(pieces: list[bytes]) -> None:
    lines = Lines()
    found = [line for piece in pieces for line in lines.feed(piece)] + lines.rest()
    whole = b"".join(pieces).split(b"\n")
    assert found == (whole if whole[-1] else whole[:-1])


@given(st.binary())
def test_every_line_is_readable(line: bytes) -> None:
    readable(line).encode()


def test_a_line_without_end_comes_in_pieces() -> None:
    lines = Lines()
    assert [len(piece) for piece in lines.feed(b"x" * (2 * LINE_LIMIT + 1))] == [LINE_LIMIT] * 2
    assert lines.rest() == [b"x"]


def test_a_bar_that_moves_for_hours_is_one_line() -> None:
    lines = Lines()
    for number in range(LINE_LIMIT):
        assert lines.feed(b"\r%d of many" % number) == []
        assert lines.partial == f"{number} of many"
    # A lower bar might follow its end.
    found = lines.feed(b"\n") + lines.feed(b"next\n")
    assert [readable(line) for line in found] == [f"{LINE_LIMIT - 1} of many", "next"]


def test_an_outlet_never_waits_for_its_reader(loop: EventLoop, pipe: tuple[int, int]) -> None:
    read, write = pipe
    outlet = Outlet(loop, write)
    data = os.urandom(PENDING_LIMIT + 500_000)
    outlet.write(data)  # returns although nothing has been read
    assert outlet.full
    room: list[bool] = []
    outlet.when_room.append(lambda: room.append(True))
    seen = b""
    while outlet.pending:
        seen += os.read(read, 65536)
        loop.run_once()
    assert room == [True]
    while select.select([read], [], [], 0)[0]:
        seen += os.read(read, 65536)
    assert seen == data


def test_an_outlet_whose_reader_is_gone_takes_everything(
    loop: EventLoop, pipe: tuple[int, int]
) -> None:
    read, write = pipe
    outlet = Outlet(loop, write)
    outlet.write(b"x" * PENDING_LIMIT * 2)
    os.close(read)
    while outlet.pending:
        loop.run_once()
    outlet.write(b"more")
    assert not outlet.pending
    assert not outlet.full


def test_a_full_outlet_stops_the_reading_from_workers(
    loop: EventLoop, pipe: tuple[int, int]
) -> None:
    console_read, console = pipe
    worker_read, worker = os.pipe()
    outlet = Outlet(loop, console)
    capture = Capture(loop, worker_read, b"[0] ", outlet, None)
    outlet.write(b"x" * (PENDING_LIMIT + 65536))
    os.write(worker, b"first\n")
    loop.run_once()  # one read may happen, the outlet's state is looked at after it
    os.write(worker, b"second\n")
    loop.call_later(0, lambda: None)
    loop.run_once()
    assert list(capture.last) == ["first"]
    while outlet.full:
        os.read(console_read, 65536)
        loop.run_once()
    loop.run_once()
    assert list(capture.last) == ["first", "second"]
    outlet.write(b"x" * (PENDING_LIMIT + 65536))
    os.write(worker, b"third\n")
    loop.run_once()
    os.write(worker, b"fourth\n")
    outlet.drop()  # what is dropped leaves room, although its reader has taken nothing
    loop.call_later(0, lambda: None)
    loop.run_once()
    assert list(capture.last)[-1] == "fourth"
    capture.close()
    capture.close()
    os.close(worker)


def test_a_capture_drains_a_pipe_that_stays_open(loop: EventLoop) -> None:
    read, write = os.pipe()
    capture = Capture(loop, read, b"", None, None)
    os.write(write, b"one\ntwo")
    capture.drain()
    assert list(capture.last) == ["one", "two"]
    os.write(write, b"of a child\n")
    loop.run_once()
    assert list(capture.last)[-1] == "of a child"
    os.close(write)
    loop.run_once()
    capture.close()

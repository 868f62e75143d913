"""What another thread executes is seen while threads begin and end and finalizers run."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from outlast.system.frames import exception_of, frame_of

NET_S = 60.0

# Garbage whose finalizer begins a thread, and a collection that is due at each of the next
# allocations in turn: some of them are those of Python's look at the threads.
PROGRAM = """
import gc, sys, threading
from outlast.system.frames import exception_of, frame_of
class Node:
    def __init__(self):
        self.me = self
    def __del__(self):
        threading.Thread(target=int).start()
        found.append(1)
def outermost(frame):
    while frame.f_back is not None:
        frame = frame.f_back
    return frame
main, ended, found = threading.get_ident(), threading.Event(), []
parked = [threading.Thread(target=ended.wait) for _ in range(6)]
for each in parked:
    each.start()
for due in range(1, 60):
    for look in (frame_of, exception_of):
        gc.collect()
        Node()
        gc.set_threshold(gc.get_count()[0] + due)
        looked = look(main)
        gc.set_threshold(100_000)
        assert gc.isenabled()
        assert look is exception_of or outermost(looked) is sys._getframe()
        looked = None
gc.collect()
ended.set()
assert len(found) > 100
"""


def test_a_finalizer_that_begins_a_thread_stops_nothing() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=NET_S)


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collector_off")
def test_a_collector_that_is_off_stays_off() -> None:
    assert frame_of(threading.get_ident()) is not None
    assert not gc.isenabled()


def test_what_a_thread_handles_and_one_that_has_ended() -> None:
    error = ValueError("of this thread")
    try:
        raise error
    except ValueError:
        assert exception_of(threading.get_ident()) is error
    assert exception_of(threading.get_ident()) is None
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    assert frame_of(ended.ident or 0) is None

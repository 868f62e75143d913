"""Whether this rank only waits for other ranks: what its monitor process cannot see from outside.

The function's thread may wait in this package for minutes, in a declared long phase: for the end of
a save, say. As long as this rank, or another one, writes its files, that is no hang. If every rank
only waits for the others, it is one. So the few places where this package blocks say what they do.
One that is not marked counts as work: a hang is then found later, and never a false one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Observer(Protocol):
    """What is told: the page of memory that the monitor process reads."""

    waits: int  # how deep the function's thread is in `waits()`; only that thread writes it
    works: int  # for how many owners something works in the background
    worked: float  # when that has changed last (monotonic)


class _Here(threading.local):
    owner: object = None  # for which this thread works


_here, _lock = _Here(), threading.Lock()  # no thread that may be interrupted takes the lock
_working: set[int] = set()
_observer: Observer | None = None
_thread = 0  # the function's


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tells `observer` of the waits of this thread, and of all work in this process."""
    global _observer, _thread
    with _lock:
        _observer, _thread = observer, threading.get_ident()
        observer.works = len(_working)
    try:
        yield
    finally:
        with _lock:
            _observer, _thread = None, 0


@contextmanager
def waits() -> Iterator[None]:
    """This thread waits for other ranks, or for what works for it in the background."""
    observer, owner = _observer, _here.owner
    if owner is not None:
        set_working(owner, False)
    elif threading.get_ident() == _thread and observer is not None:
        observer.waits += 1
    else:
        observer = None
    try:
        yield
    finally:
        if owner is not None:
            set_working(owner, True)
        elif observer is not None and observer.waits:
            observer.waits -= 1


@contextmanager
def works(owner: object) -> Iterator[None]:
    """This thread works for `owner`, in the background: it writes files, commits, compares."""
    _here.owner = owner
    set_working(owner, True)
    try:
        yield
    finally:
        set_working(owner, False)
        _here.owner = None


def set_working(owner: object, working: bool) -> None:
    """Says whether a thread or process works for `owner`. Not on the function's thread."""
    with _lock:
        (_working.add if working else _working.discard)(id(owner))
        if _observer is not None:
            _observer.worked, _observer.works = time.monotonic(), len(_working)

"""Waits for descriptors, and waits in a thread that can be abandoned."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest

from outlast.system.parallel import ThreadedWait
from outlast.system.processes import readable


def test_only_the_readable_descriptors_are_returned() -> None:
    quiet, quiet_end = os.pipe()
    ready, ready_end = os.pipe()
    try:
        assert readable(quiet, ready, timeout=0) == []
        os.write(ready_end, b"x")
        assert readable(quiet, ready) == [ready]
        os.close(quiet_end)
        quiet_end = -1
        assert set(readable(quiet, ready)) == {quiet, ready}  # its other end is closed
    finally:
        for descriptor in (quiet, ready, ready_end, quiet_end):
            if descriptor >= 0:
                os.close(descriptor)


def test_a_wait_returns_what_the_thread_returned() -> None:
    assert ThreadedWait(lambda: 7, "wait").result() == 7


def test_a_wait_raises_what_the_thread_raised() -> None:
    def fail() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        ThreadedWait(fail, "wait").result()


def test_an_abandoned_wait_raises_while_its_thread_goes_on() -> None:
    release = threading.Event()
    wait = ThreadedWait(release.wait, "wait")
    wait.abandon(RuntimeError("abandoned"))
    with pytest.raises(RuntimeError, match="abandoned"):
        wait.result()
    release.set()
    wait.join(60.0)


def test_the_error_of_a_wait_does_not_keep_its_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.wait = ThreadedWait(self.fail, "wait")

        def fail(self) -> None:
            try:
                {}["a key"]
            except KeyError as e:
                raise ValueError("mine") from e

    gc.disable()
    try:
        owner = Owner()
        owner.wait.join(60.0)
        alive = weakref.ref(owner)
        del owner
        assert alive() is None
    finally:
        gc.enable()

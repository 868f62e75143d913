"""What Python reports because of an interrupt is not shown; all else is."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.resource_sharer import DupFd as SharedDescriptor
from socket import AF_UNIX, socket

import pytest

from outlast.inprocess.interruption.release import QuietHooks


@pytest.fixture
def hooks() -> Iterator[QuietHooks]:
    made = QuietHooks()
    before = sys.unraisablehook, sys.excepthook
    made.install()
    yield made
    made.restore()
    assert (sys.unraisablehook, sys.excepthook) == before


def _shares_a_descriptor(ours: Connection) -> None:
    """As a worker of a data loader shares a tensor."""
    read, _ = os.pipe()
    shared = SharedDescriptor(read)
    ours.send(shared)
    ours.recv()
    sys.excepthook(ValueError, ValueError("of the user"), None)
    os._exit(0)


@pytest.mark.parametrize("installed", [True, False])
def test_a_fetch_that_is_broken_off_is_not_reported_by_the_worker(
    hooks: QuietHooks, installed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    if not installed:
        hooks.restore()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_shares_a_descriptor, args=(theirs,))
    worker.start()
    try:
        shared = ours.recv()
        address, _ = shared._id
        with socket(AF_UNIX) as broken_off:
            broken_off.connect(address)
        os.close(shared.detach())  # the worker serves one after the other
        ours.send("done")
        worker.join()
    finally:
        worker.kill()
        worker.join()
        ours.close()
        theirs.close()
    told = capfd.readouterr().err
    assert ("resource_sharer" in told) is not installed, told
    assert "ValueError: of the user" in told

"""The exported names are exactly the documented ones, and importing them has no side effects."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outlast import async_checkpoint

CALLS = {"AsyncCallsQueue", "AsyncRequest", "DistributedAsyncCaller", "FailurePolicy"}


def test_the_names_of_background_calls() -> None:
    assert set(async_checkpoint.__all__) >= CALLS
    for name in async_checkpoint.__all__:
        assert getattr(async_checkpoint, name).__name__ == name
    assert set(dir(async_checkpoint)) >= set(async_checkpoint.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = async_checkpoint.nothing


def test_an_import_starts_nothing() -> None:
    code = (
        "import signal, sys, threading\n"
        "before = [signal.getsignal(n) for n in signal.valid_signals()]\n"
        "import outlast.async_checkpoint as room\n"
        "assert 'torch' not in sys.modules\n"
        "for name in room.__all__: getattr(room, name)\n"
        "assert [signal.getsignal(n) for n in signal.valid_signals()] == before\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

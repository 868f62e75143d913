"""What gloo.py needs of the build of torch, and what it leaves alone."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from outlast.inprocess.interruption import gloo
from outlast.inprocess.interruption.gloo import GlooAbort


@pytest.fixture(autouse=True)
def _checked_anew() -> Iterator[None]:
    gloo._code.cache_clear()
    yield
    gloo._code.cache_clear()


def test_this_build_fits(caplog: pytest.LogCaptureFixture) -> None:
    GlooAbort().shut_down()
    assert [name for _, name in gloo._code()].count(gloo._BUFFER) == 2
    assert gloo._function(gloo._SIGNALS) is None or not caplog.records


@pytest.mark.parametrize("lost", ["symbol", "type"])
def test_a_build_that_does_not_fit_is_not_called_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    if lost == "symbol":
        monkeypatch.setitem(gloo._CALLS, gloo._BUFFER, ("_ZN4gloo7renamedEv",))
    else:
        monkeypatch.setattr(gloo, "type_name", lambda memory, address: b"N4gloo5OtherE")
    caplog.set_level(logging.WARNING, "outlast.inprocess")
    for _ in range(2):
        abort = GlooAbort()
        assert not abort.shut_down()
        assert abort.wake_blocked(settled=True) == 0
    assert gloo._BUFFER not in [name for _, name in gloo._code()]
    (warning,) = caplog.messages
    assert ("_ZN4gloo7renamedEv" if lost == "symbol" else "UnboundBuffer") in warning
    assert "timeout=" in warning


_MIB = 1 << 20
_RECEIVER = """
import sys, torch
import torch.distributed as dist
from datetime import timedelta
group = dist.ProcessGroupGloo(dist.FileStore(sys.argv[1], 2), 1, 2, timedelta(minutes=5))
work = group.recv([torch.empty(64 << 20, dtype=torch.uint8)], 0, 0)
print("receives", flush=True)
work.wait()
"""


def test_an_object_whose_wait_has_ended_is_not_touched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The thread destroys the buffer as soon as the first call has ended its wait: a second call
    locked a mutex in freed memory, and the process was aborted.
    """
    receiver = subprocess.Popen(
        [sys.executable, "-c", _RECEIVER, str(tmp_path / "store")], stdout=subprocess.PIPE
    )
    store = dist.FileStore(str(tmp_path / "store"), 2)
    group = dist.ProcessGroupGloo(store, 0, 2, timedelta(minutes=5))
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"receives\n"
    # Some of the bytes are written, and the rest never: gloo forgets such a send.
    receiver.send_signal(signal.SIGSTOP)
    sender = threading.Thread(
        target=lambda: group.send([torch.zeros(64 * _MIB, dtype=torch.uint8)], 1, 0).wait()
    )
    found, calls = gloo._function, []

    def slow(symbol: str) -> Any:
        def call(*arguments: object) -> None:
            calls.append(symbol)
            found(symbol)(*arguments)
            if symbol == gloo._ABORTS_SEND:
                sender.join(60)

        return call

    try:
        sender.start()
        while not gloo.any_blocked():
            time.sleep(0.01)
        monkeypatch.setattr(gloo, "_function", slow)
        abort = GlooAbort()
        while sender.is_alive():
            abort.wake_blocked(settled=not abort.shut_down())
            time.sleep(gloo.SETTLED_PATIENCE_S)
    finally:
        receiver.kill()
        receiver.communicate()
    assert calls == [gloo._ABORTS_SEND]

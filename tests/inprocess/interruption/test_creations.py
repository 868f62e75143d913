"""What the search for communicators that are being made costs a restart."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from outlast.inprocess.interruption import nccl_bootstrap
from outlast.system import devices


def test_without_a_device_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def search() -> list[bytes]:
        raise AssertionError("searched")

    monkeypatch.setattr(devices, "available", lambda: None)
    monkeypatch.setattr(nccl_bootstrap, "_stacks", search)
    with socket.create_server(("127.0.0.1", 0)):  # as gloo has one in each process
        nccl_bootstrap.end_creations(frozenset())


def test_of_a_stack_only_what_its_thread_uses_is_read() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    try:
        call = Path(f"/proc/self/task/{thread.native_id}/syscall")
        while len(call.read_text().split()) < 3:  # it runs still
            pass
        read = [len(each) for each in nccl_bootstrap._stacks()]
    finally:
        ends.set()
        thread.join()
    assert 0 < sum(read) < nccl_bootstrap._MOST, read

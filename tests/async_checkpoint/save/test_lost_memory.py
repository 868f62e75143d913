"""Memory that a dead process has left, and that is not there any more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from outlast.async_checkpoint.snapshot import buffers
from outlast.async_checkpoint.writer.handover import HandedOver, Inheritance
from outlast.system.shared_memory import SharedMemory


def test_it_is_not_taken_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot: Any = {"step": 3, "layout": [("file", 0, 5000)]}
    memory = SharedMemory(5000)
    assert memory.intact
    os.ftruncate(memory.descriptor, 4096)
    assert not memory.intact
    handed = HandedOver(snapshot, b"", os.dup(memory.descriptor))
    monkeypatch.setattr(buffers, "take_over", lambda path: Inheritance([handed]))
    writer: Any = None  # is not told of it
    pool = buffers.BufferPool(writer)
    pool.take_over(Path("socket"))
    assert pool.handed_over == []
    assert "the memory with the snapshot of step 3 is lost" in caplog.text
    memory.close()

"""Tensors are read from the memory of another process, if it is the right one."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch

from outlast.elastic.job.live.same_host import OwnersMemory, lent, reader
from outlast.system import parallel
from procs import NET_S

OWNER = """
import json, sys, torch
from outlast.elastic.job.live.same_host import lent
views = [torch.full((20 << 20,), 7, dtype=torch.uint8), torch.arange(5).view(torch.uint8)]
with lent(views, json.loads(sys.stdin.readline())) as told:
    print(json.dumps(told), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def told(owner: subprocess.Popen[str], to: list[int]) -> list[int]:
    assert owner.stdin is not None
    assert owner.stdout is not None
    owner.stdin.write(json.dumps(to) + "\n")
    owner.stdin.flush()
    return list(json.loads(owner.stdout.readline()))


@pytest.mark.slow
def test_large_and_small_tensors_are_read_from_the_owner_alone(
    owner: subprocess.Popen[str],
) -> None:
    found = told(owner, reader())
    memory = OwnersMemory(found)
    large, small = torch.zeros(20 << 20, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64)
    spans = [
        (large, memory.addresses[0]),
        (small.view(torch.uint8), memory.addresses[1]),
    ]
    memory.read(spans)
    assert large.eq(7).all()
    assert small.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="is another one here"):
        OwnersMemory([found[0], found[1] ^ 1, *found[2:]])
    owner.kill()
    owner.wait()
    with pytest.raises(OSError, match="process_vm_readv"):
        memory.read(spans)


def test_what_is_read_to_stays_when_the_reader_is_interrupted(
    owner: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes while this thread waits for the one that reads, which is left behind."""
    memory, read = OwnersMemory(told(owner, reader())), OwnersMemory._read
    waits, interrupted, goes_on, ended = (threading.Event() for _ in range(4))

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *args: Any, **kwargs: Any) -> None:
            waits.set()
            super().shutdown(*args, **kwargs)

    def late(*piece: Any) -> None:
        assert waits.wait(NET_S)
        # Again, if it came when that thread was about to wait: no handler runs then.
        while not interrupted.wait(0.05):
            signal.pthread_kill(main, signal.SIGUSR1)
        assert goes_on.wait(NET_S)
        read(*piece)
        ended.set()

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise InterruptedError

    def read_until_interrupted() -> weakref.ref[Any]:
        content = numpy.zeros(40, dtype=numpy.uint8)
        with contextlib.suppress(InterruptedError):
            memory.read([(torch.from_numpy(content), memory.addresses[1])])
        return weakref.ref(content)

    main = threading.get_ident()
    monkeypatch.setattr(OwnersMemory, "_read", late)
    monkeypatch.setattr(parallel, "ThreadPoolExecutor", Pool)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        content = read_until_interrupted()
        kept = content() is not None
    finally:
        signal.signal(signal.SIGUSR1, before)
        goes_on.set()
    assert kept
    assert ended.wait(NET_S)


def test_a_reader_on_another_host_gets_nothing() -> None:
    pid, kernel = reader()
    with lent([torch.zeros(1)], [pid, kernel ^ 1]) as found:
        assert found == [0]
    with pytest.raises(OSError, match="not lent"):
        OwnersMemory([*found, *[0] * 4])

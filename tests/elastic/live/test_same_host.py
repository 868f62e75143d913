"""Tensors are read from the memory of another process, if it is the right one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from outlast.elastic.job.live.same_host import OwnersMemory, lent, reader

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


def test_large_and_small_tensors_are_read_from_the_owner_alone(
    owner: subprocess.Popen[str],
) -> None:
    found = told(owner, reader())
    memory = OwnersMemory(found)
    large, small = torch.zeros(20 << 20, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64)
    spans = [
        (large.data_ptr(), memory.addresses[0], large.nbytes),
        (small.data_ptr(), memory.addresses[1], small.nbytes),
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


def test_a_reader_on_another_host_gets_nothing() -> None:
    pid, kernel = reader()
    with lent([torch.zeros(1)], [pid, kernel ^ 1]) as found:
        assert found == [0]
    with pytest.raises(OSError, match="not lent"):
        OwnersMemory([*found, *[0] * 4])

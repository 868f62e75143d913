"""Ranks on several "hosts" that restore the same: each byte of storage is read by one of them."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import RANK, join_group, leave_group, main, raising, say, scenario

from async_checkpoint.checkpoints import copy_of, same
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.restore import load, shared_read, verified_read
from outlast.async_checkpoint.storage import system_errors
from outlast.inprocess import CallWrapper, Wrapper


def state(step: int) -> dict[str, Any]:
    """Several MiB in several chunks; a transposed tensor, and two that share memory."""
    generator = torch.Generator().manual_seed(step)
    table = torch.randn(1500, 900, generator=generator)
    return {
        "large": torch.randn(4_000_001, generator=generator),
        "bits": torch.randint(0, 255, (777,), generator=generator, dtype=torch.uint8),
        "transposed": torch.randn(700, 1100, generator=generator).t(),
        "table": table,
        "tied": table,
        "step": step,
    }


@contextmanager
def counted(read: list[int]) -> Iterator[None]:
    """Counts the bytes that this rank reads of files."""
    real = verified_read.read_hashed

    def read_hashed(reader: Any, offset: int, sections: Any) -> tuple[int, str]:
        got = real(reader, offset, sections)
        read.append(got[0])
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verified_read, "read_hashed", read_hashed)
        yield


def restored(path: str) -> None:
    """Says which step was restored, and how much this rank has read."""
    target = copy_of(state(0))
    target["transposed"], target["tied"] = state(0)["transposed"], target["table"]
    read: list[int] = []
    with Checkpointer(path) as checkpointer, counted(read):
        step = raising(lambda: checkpointer.restore(target))
    if step is not None:
        assert same(target, state(step)), f"the state of step {step} differs"
    say("read", bytes=sum(read))
    leave_group()


@scenario
def saves(path: str) -> None:
    with Checkpointer(path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).wait()


@scenario
def reads(path: str) -> None:
    join_group()
    restored(path)


@scenario
def reads_with_broadcasts(path: str) -> None:
    """As in a group of NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_read, "broadcasts", lambda _: True)
        reads(path)


@scenario
def cannot_read(path: str) -> None:
    """Rank 1 alone. It says which chunks it has tried to read."""
    join_group()
    real, tried = verified_read.read_hashed, set[int]()

    def read_hashed(reader: Any, offset: int, sections: Any) -> tuple[int, str]:
        if offset:
            tried.add(offset)
            raise OSError(errno.EIO, "Input/output error")
        return real(reader, offset, sections)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system_errors, "_pause", lambda _: None)
        if RANK == 1:
            patch.setattr(verified_read, "read_hashed", read_hashed)
            # One chunk after the other: what was read ahead is tried too.
            patch.setattr(shared_read, "default_threads", lambda: 1)
        restored(path)
        say("tried", chunks=len(tried))


@scenario
def arrives_damaged(path: str) -> None:
    """What rank 0 sends: of one chunk, a byte has changed on the way; of the next, what says that
    it was read.
    """
    join_group()
    real, sent = shared_read.SharedRead._send, list[int]()

    def send(self: shared_read.SharedRead, content: torch.Tensor, to: int) -> Any:
        damaged = content.clone()
        sent.append(to)
        if len(sent) % 2:
            damaged[0] += 1
        else:
            damaged[-1] = 0
        return real(self, damaged, to), damaged

    @dataclasses.dataclass
    class Work:
        works: tuple[Any, torch.Tensor]

        def wait(self, timeout: Any) -> None:
            self.works[0].wait(timeout)

    with pytest.MonkeyPatch.context() as patch:
        if RANK == 0:
            patch.setattr(shared_read.SharedRead, "_send", lambda *args: Work(send(*args)))
        restored(path)


@scenario
def has_no_memory(path: str) -> None:
    """Rank 2 alone."""
    join_group()

    def piece(_: Any) -> Any:
        raise MemoryError("no memory for a part of a tensor")

    with pytest.MonkeyPatch.context() as patch:
        if RANK == 2:
            patch.setattr(load._Indirect, "piece", piece)
        restored(path)


@scenario
def has_no_memory_with_broadcasts(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_read, "broadcasts", lambda _: True)
        has_no_memory(path)


@scenario
def fault_in_between(path: str) -> None:
    """Rank 0 fails at its second chunk; then all restore again, in place."""
    real, sent = shared_read.SharedRead._send, list[int]()

    def send(self: shared_read.SharedRead, content: torch.Tensor, to: int) -> Any:
        sent.append(to)
        if RANK == 0 and len(sent) == 2:
            raise RuntimeError("a planned fault")
        return real(self, content, to)

    @Wrapper()
    def restore(call: CallWrapper) -> None:
        join_group()
        say("iteration", number=call.iteration)
        target = copy_of(state(0))
        with Checkpointer(path) as checkpointer:
            step = checkpointer.restore(target)
        assert step == 2
        assert same(target, state(2))
        say("returned", value=step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_read.SharedRead, "_send", send)
        restore()
    say("read", bytes=0)


main()

"""Snapshots of tensors on a GPU: overlapped copies on streams of their own, page-locked buffers.
CUDA is a stand-in here: its streams run what is queued when they are told to, or waited for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from async_checkpoint.checkpoints import NET, copy_of, same
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.snapshot import buffers, device_copy, overlap, snapshot
from outlast.async_checkpoint.snapshot.device_copy import DeviceChunks, DeviceCopy
from outlast.async_checkpoint.snapshot.snapshot import Snapshot
from outlast.errors import CheckpointError
from outlast.system import devices
from outlast.system.shared_memory import SharedMemory


class Stream:
    """Runs the queued copies in order, at the latest when the host waits for it."""

    def __init__(self, device: Any = None) -> None:
        self.queue: list[Callable[[], object]] = []

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.synchronize)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.synchronize()


class Cuda:
    """One device, whose tensors are in CPU memory."""

    def __init__(self) -> None:
        self.training = Stream()
        self.side: list[Stream] = []

    def new_stream(self, device: Any) -> Stream:
        self.side.append(Stream())
        return self.side[-1]

    def current_stream(self, device: Any) -> Stream:
        return self.training


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """All floating-point tensors with more than one dimension are "on a GPU"."""
    cuda = Cuda()

    def queue_copy(to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        # Not the values of now: those at the moment when the stream gets to it.
        stream.queue.append(lambda: to.copy_(source.detach()))

    for module in (device_copy, overlap, snapshot):
        monkeypatch.setattr(module, "on_accelerator", lambda tensor: tensor.dim() > 1)
    monkeypatch.setattr(device_copy, "recorded", Event)
    monkeypatch.setattr(device_copy, "side_stream", cuda.new_stream)
    monkeypatch.setattr(device_copy, "current_stream", cuda.current_stream)
    monkeypatch.setattr(device_copy, "_queue_copy", queue_copy)
    return cuda


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.randn(8, 64)).square().sum().backward()

    def state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[DeviceChunks]:
    """The overlapped copies from the GPU, which begin when the training thread waits for them."""
    made: list[DeviceChunks] = []
    fill, waited = Snapshot._fill_all, Snapshot._await_copy

    gates: dict[int, threading.Event] = {}

    def held(copy: Snapshot, chunks: Any) -> None:
        if isinstance(chunks, DeviceChunks):
            made.append(chunks)
        assert gates.setdefault(id(copy), threading.Event()).wait(60)
        fill(copy, chunks)

    def awaited(copy: Snapshot) -> None:
        gates.setdefault(id(copy), threading.Event()).set()
        waited(copy)

    monkeypatch.setattr(Snapshot, "_fill_all", held)
    monkeypatch.setattr(Snapshot, "_await_copy", awaited)
    return made


def test_the_state_at_the_save_is_saved(
    tmp_path: Path, cuda: Cuda, copies: list[DeviceChunks]
) -> None:
    training, expected = Training(), {}
    with Checkpointer(tmp_path, overlap=training.optimizer, max_in_flight=2) as checkpointer:
        for step in range(3):
            training.backward()
            training.optimizer.step()
            expected[step] = copy_of(training.state())
            checkpointer.save(step, training.state())
            training.backward()
            training.optimizer.step()  # waits for the copy
        checkpointer.wait(NET)
        for step, state in expected.items():
            found = copy_of(training.state())
            assert checkpointer.restore(found, step=step) == step
            assert same(found, state)
    assert len(copies) == 3
    assert not any(stream.queue for stream in cuda.side)


def test_the_copy_begins_after_what_training_has_queued(
    tmp_path: Path, cuda: Cuda, copies: list[DeviceChunks]
) -> None:
    training = Training()
    training.backward()
    training.optimizer.step()
    weight = training.net[0].weight
    cuda.training.queue.append(lambda: weight.data.fill_(7.0))  # a kernel that has not run yet
    with Checkpointer(tmp_path, overlap=training.optimizer) as checkpointer:
        checkpointer.save(1, training.state())
        checkpointer.wait(NET)
        found = training.state()
        weight.data.zero_()
        checkpointer.restore(found)
    assert bool((weight == 7.0).all())


def test_a_write_before_the_step_is_found(
    tmp_path: Path, cuda: Cuda, copies: list[DeviceChunks]
) -> None:
    training = Training()
    training.backward()
    training.optimizer.step()
    with Checkpointer(tmp_path, overlap=training.optimizer) as checkpointer:
        handle = checkpointer.save(1, training.state())
        with torch.no_grad():
            training.net[0].weight.add_(1.0)
        error = None
        try:
            handle.wait(NET)
        except CheckpointError as e:  # pytest's record of it would keep the tensors of the save
            error = str(e)
    assert error is not None
    assert "'net.0.weight' was written to before the optimizer's step" in error


def pairs(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    memory = torch.zeros(count, 2, 8)
    return [(torch.full((2, 8), float(i + 1)), memory[i]) for i in range(count)]


def test_nothing_is_copied_after_a_call_off(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "_GROUP_BYTES", 64)
    chunks = DeviceChunks(pairs(4))
    asked: list[int] = []

    def called_off() -> bool:  # while the copies are queued
        asked.append(1)
        return len(asked) > 2

    chunks._queue(called_off)
    assert cuda.side[0].queue
    chunks.settle()
    assert len(chunks) == 4
    assert not cuda.side[0].queue
    chunks.fill(3, called_off)  # never queued


def test_each_group_ends_at_its_last_address(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "_GROUP_BYTES", 128)
    copies = pairs(5)
    chunks = DeviceChunks(copies)
    ends = [chunks.fill(number) for number in range(len(chunks))]
    assert ends == [copies[i][1].data_ptr() + 64 for i in (1, 3, 4)]
    assert all(torch.equal(source, to) for source, to in copies)


def test_an_eager_copy_waits_for_the_streams_of_the_training_thread(cuda: Cuda) -> None:
    copies = pairs(2)
    seen: list[str] = []
    cuda.training.queue.append(lambda: seen.append("ran"))
    DeviceCopy(copies).run()
    assert seen == ["ran"]


class Cudart:
    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802 - CUDA's name
        self.calls.append(("register", *arguments))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Cudart:
    cudart = Cudart(getattr(request, "param", 0))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: _Device(device, cudart))
    return cudart


class _Device:
    def __init__(self, device: int, cudart: Cudart) -> None:
        self.device, self.cudart = device, cudart

    def __enter__(self) -> None:
        self.cudart.calls.append(("device", self.device))

    def __exit__(self, *_: object) -> None:
        pass


def test_memory_is_unpinned_before_it_is_unmapped(cudart: Cudart) -> None:
    memory = SharedMemory(4096)
    address = memory.address
    unlock = devices.of("cuda").page_lock(address, memory.size_bytes, 2)
    buffer = buffers.SnapshotBuffer(0, memory, unlock)
    assert cudart.calls == [("device", 2), ("register", address, 4096, 1)]
    closed = memory.close
    memory.close = lambda: (cudart.calls.append(("close",)), closed())  # type: ignore[method-assign,func-returns-value,assignment,return-value]
    buffer.drop_memory()
    buffer.drop_memory()
    assert cudart.calls[2:] == [("device", 2), ("unregister", address), ("close",)]


@pytest.mark.parametrize("cudart", [2], indirect=True)
def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cleared: list[torch.device] = []
    empty = torch.empty

    def kernel(*size: int, device: torch.device) -> torch.Tensor:
        cleared.append(device)
        return empty(*size)

    monkeypatch.setattr(torch, "empty", kernel)
    memory = SharedMemory(4096)
    with caplog.at_level(logging.INFO):
        assert devices.of("cuda").page_lock(memory.address, 4096, 1) is None
    assert cleared == [torch.device("cuda", 1)]
    assert "could not be page-locked (CUDA error 2)" in caplog.text
    memory.close()


def test_buffers_are_pinned_for_the_device_of_the_training_thread(
    tmp_path: Path, cudart: Cudart
) -> None:
    state = {"weight": torch.ones(64, 64)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait(NET)
    assert {call for call in cudart.calls if call[0] == "device"} == {("device", 2)}
    kinds = [call[0] for call in cudart.calls]
    assert kinds.count("register") == kinds.count("unregister") > 0

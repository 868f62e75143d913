"""Copies tensors from GPUs into a snapshot buffer: at once, or on streams of their own during
training. Page-locks the buffers, so that a GPU copies into them at full speed, in the background.

A copy from a GPU is only queued when the call returns. A restart in place may interrupt the
training thread before the copy has ended, and the buffer must not be used again before the GPU has
stopped writing to it. So both kinds of copy are given to the snapshot before the first one is
queued, and `call_off` waits for all that were queued. If the GPU hangs, that wait does not end, and
the hard timeout ends the process.

`DeviceChunks` queues its copies behind the work that the training thread has queued so far, on a
stream that does not hold up later work: the kernels of the next forward and backward pass run at
the same time. They only read what is copied; `Snapshot` makes the optimizer's step wait, on
the host, until the copies have ended, so its kernels are queued afterwards.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch
from torch import cuda

from outlast.system.shared_memory import SharedMemory

log = logging.getLogger("outlast.checkpoint")

CopyPair = tuple[torch.Tensor, torch.Tensor]  # from, to

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices of this process
_GROUP_BYTES = 16 << 20
"""The writer is notified, at most, whenever this much has been copied."""


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in the memory of a GPU."""
    return tensor.is_cuda


class DeviceCopy:
    """Copies tensors of any kind, from any device, and waits for the copies."""

    def __init__(self, copies: Sequence[CopyPair]) -> None:
        self._copies = copies
        # Taken here: in the thread that calls off the copy, the current streams are others.
        self._streams = [
            cuda.current_stream(device)
            for device in dict.fromkeys(source.device for source, _ in copies if on_gpu(source))
        ]

    def run(self) -> None:
        if not self._copies:
            return
        with torch.no_grad():
            torch._foreach_copy_(
                [to for _, to in self._copies],
                [source for source, _ in self._copies],
                non_blocking=bool(self._streams),
            )
        self.call_off()

    def call_off(self) -> None:
        for stream in self._streams:
            stream.synchronize()


class DeviceChunks:
    """The copies from GPUs during training, in the order of the buffer. The writer
    takes the checksums. Create it on the training thread.

    Args:
        copies: from tensors on GPUs, in the order of their targets in the buffer.
    """

    hashed = False

    def __init__(self, copies: Sequence[CopyPair]) -> None:
        self._groups = _groups([pair for pair in copies if pair[0].nbytes])
        self._ready: dict[torch.device, cuda.Event] = {}
        for source, _ in copies:
            if source.device not in self._ready:
                event = self._ready[source.device] = cuda.Event()
                event.record(cuda.current_stream(source.device))
        self._queued = False
        self._streams: list[cuda.Stream] = []
        self._done: list[list[cuda.Event]] = []

    def __len__(self) -> int:
        return len(self._groups)

    def fill(self, number: int, called_off: Callable[[], bool] = lambda: False) -> int:
        """Waits for one group of copies; returns the address of its end. The first call queues all
        of them.
        """
        if not self._queued:
            self._queued = True
            self._queue(called_off)
        if number < len(self._done):  # else it was called off before the group was queued
            for event in self._done[number]:
                event.synchronize()
        _, last = self._groups[number][-1]
        return last.data_ptr() + last.nbytes

    def settle(self) -> None:
        """When this returns, nothing is being copied."""
        for stream in self._streams:
            stream.synchronize()

    def checksums(self) -> dict[str, dict[str, object]]:
        return {}

    def _queue(self, called_off: Callable[[], bool]) -> None:
        streams: dict[torch.device, cuda.Stream] = {}
        for device, ready in self._ready.items():
            streams[device] = cuda.Stream(device)
            streams[device].wait_event(ready)
            self._streams.append(streams[device])
        for group in self._groups:
            if called_off():
                return
            for source, to in group:
                _queue_copy(to, source, streams[source.device])
            ended = []
            for device in dict.fromkeys(source.device for source, _ in group):
                ended.append(cuda.Event())
                ended[-1].record(streams[device])
            self._done.append(ended)


def _queue_copy(to: torch.Tensor, source: torch.Tensor, stream: cuda.Stream) -> None:
    # Without gradients: this runs in a thread of its own, where they are enabled.
    with torch.no_grad(), cuda.stream(stream):
        to.copy_(source, non_blocking=True)


def _groups(copies: Sequence[CopyPair]) -> list[list[CopyPair]]:
    """Cuts the copies into groups of about `_GROUP_BYTES`; a tensor is not split."""
    groups: list[list[CopyPair]] = []
    size = _GROUP_BYTES
    for pair in copies:
        if size >= _GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(pair)
        size += pair[0].nbytes
    return groups


def device_in_use() -> int | None:
    """The current CUDA device of this thread; `None` if the process has not used CUDA."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


class PinnedMemory:
    """A registration of memory with CUDA."""

    def __init__(self, memory: SharedMemory) -> None:
        self._address = memory.address

    @classmethod
    def pin(cls, memory: SharedMemory, device: int) -> PinnedMemory | None:
        """Page-locks the memory. Without it copies are slower but correct, so an error is logged.

        Args:
            device: any device that this process uses. The current one may be different in a thread
                of this package, where the call would create a context on device 0.
        """
        with torch.cuda.device(device):
            cudart = torch.cuda.cudart()
            code = int(cudart.cudaHostRegister(memory.address, memory.size_bytes, _PORTABLE))
            if code == 0:
                return cls(memory)
            _clear_error(device)
        log.info(
            "a snapshot buffer of %d bytes could not be page-locked (CUDA error %d): copies from "
            "the GPU are slower",
            memory.size_bytes,
            code,
        )
        return None

    def unpin(self) -> None:
        """Ends the registration. No copy into the memory may be in progress."""
        if torch.cuda.is_initialized():  # else this is a forked child, which must not use CUDA
            torch.cuda.cudart().cudaHostUnregister(self._address)


def _clear_error(device: int) -> None:
    """Clears CUDA's last error, which the next kernel of the training would report as its own: a
    kernel here reports it instead.
    """
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=torch.device("cuda", device)).fill_(0)

"""Copies tensors from an accelerator into a buffer: at once, or on own streams during training.

A copy from a device is only queued when the call returns. A restart in place may interrupt the
training thread before the copy has ended, and the buffer must not be used again before the device
has stopped writing to it. So both kinds of copy are given to the snapshot before the first one is
queued, and `call_off` waits for all that were queued. If the device hangs, that wait does not end,
and the hard timeout ends the process.

`DeviceChunks` queues its copies behind the work that the training thread has queued so far, on a
stream that does not hold up later work: the kernels of the next forward and backward pass run at
the same time. They only read what is copied; `Snapshot` makes the optimizer's step wait, on
the host, until the copies have ended, so its kernels are queued afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Stream

from outlast.system.devices import on_accelerator
from outlast.system.error_text import first_line
from outlast.system.streams import (
    Event,
    current_stream,
    make_wait,
    on_stream,
    recorded,
    side_stream,
    wait_for,
)

CopyPair = tuple[torch.Tensor, torch.Tensor]  # from, to

_GROUP_BYTES = 16 << 20
"""The writer is notified, at most, whenever this much has been copied."""


class DeviceCopy:
    """Copies tensors of any kind, from any device, and waits for the copies."""

    def __init__(self, copies: Sequence[CopyPair]) -> None:
        self._copies = copies
        # Taken here: in the thread that calls off the copy, the current streams are others.
        self._streams = {
            device: current_stream(device)
            for device in dict.fromkeys(each.device for each, _ in copies if on_accelerator(each))
        }

    def run(self) -> None:
        if not self._copies:
            return
        try:
            with torch.no_grad():
                torch._foreach_copy_(
                    [to for _, to in self._copies],
                    [source for source, _ in self._copies],
                    non_blocking=bool(self._streams),
                )
        except RuntimeError:
            self._await_copies()  # names the device that has failed
            raise
        self._await_copies()

    def call_off(self) -> None:
        _await_writes(self._streams.values())

    def _await_copies(self) -> None:
        for device, stream in self._streams.items():
            with _named(device):
                wait_for(stream)


class DeviceChunks:
    """The copies from devices during training, in the order of the buffer. The writer takes the
    checksums. Create it on the training thread. `copies`: from tensors on the accelerator, in the
    order of their targets in the buffer.
    """

    hashed = False

    def __init__(self, copies: Sequence[CopyPair]) -> None:
        self._groups = _groups([pair for pair in copies if pair[0].nbytes])
        devices = dict.fromkeys(source.device for source, _ in copies)
        self._ready = {device: recorded(current_stream(device)) for device in devices}
        self._queued = False
        self._streams: list[Stream] = []
        self._done: list[list[tuple[torch.device, Event]]] = []

    def __len__(self) -> int:
        return len(self._groups)

    def fill(self, number: int, called_off: Callable[[], bool] = lambda: False) -> int:
        """Waits for one group of copies; the address of its end. The first call queues all."""
        if not self._queued:
            self._queued = True
            self._queue(called_off)
        if number < len(self._done):  # else it was called off before the group was queued
            for device, event in self._done[number]:
                with _named(device):
                    wait_for(event)
        _, last = self._groups[number][-1]
        return last.data_ptr() + last.nbytes

    def settle(self) -> None:
        """When this returns, nothing is being copied."""
        _await_writes(self._streams)

    def checksums(self) -> dict[str, dict[str, object]]:
        return {}

    def _queue(self, called_off: Callable[[], bool]) -> None:
        streams: dict[torch.device, Stream] = {}
        for device, ready in self._ready.items():
            streams[device] = side_stream(device)
            make_wait(streams[device], ready)
            self._streams.append(streams[device])
        for group in self._groups:
            if called_off():
                return
            for source, to in group:
                with _named(source.device):
                    _queue_copy(to, source, streams[source.device])
            devices = dict.fromkeys(source.device for source, _ in group)
            self._done.append([(device, recorded(streams[device])) for device in devices])


def _queue_copy(to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
    # Without gradients: this runs in a thread of its own, where they are enabled.
    with torch.no_grad(), on_stream(stream):
        to.copy_(source, non_blocking=True)


def _await_writes(streams: Iterable[Stream]) -> None:
    """Waits until nothing is written any more. A device that has failed writes nothing: its error
    is raised where its copies are needed. Raised here, it would leave the buffer in use for ever.
    """
    for stream in streams:
        with contextlib.suppress(RuntimeError):
            wait_for(stream)


@contextlib.contextmanager
def _named(device: torch.device) -> Iterator[None]:
    """Names the device in the errors that torch raises for it."""
    try:
        yield
    except RuntimeError as e:
        raise RuntimeError(f"{device}: {first_line(e)}") from e


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

"""Streams and events of the current accelerator, as every supported version of torch has them; and
what replaces those that a type of device lacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from outlast.system.optional_hooks import has


class HostEvent:
    """In place of an event of a device that has none: the host waits for the whole stream."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        self._stream.synchronize()

    def query(self) -> bool:
        """True: it waits."""
        self.synchronize()
        return True


Event = torch.Event | HostEvent


def recorded(stream: torch.Stream) -> Event:
    """An event after all that is queued in the stream so far."""
    device = stream.device
    has_events = has(
        device.type,
        "events",
        lambda: torch.Event(device, enable_timing=False).record(current_stream(device)),
        "the host waits for whole streams",
    )
    if not has_events:
        return HostEvent(stream)
    event = torch.Event(device, enable_timing=False)
    event.record(stream)
    return event


def has_times(device: torch.device) -> bool:
    """Whether the time between two events can be measured; the first call waits for the device."""

    def probe() -> None:
        events = [torch.Event(device, enable_timing=True) for _ in range(2)]
        for each in events:
            each.record(current_stream(device))
        events[1].synchronize()
        events[0].elapsed_time(events[1])

    return has(device.type, "times of events", probe, "stragglers are not looked for")


def side_stream(device: torch.device) -> torch.Stream:
    """A new stream, which runs beside the current one."""
    is_new = has(
        device.type,
        "streams beside the default one",
        lambda: torch.Stream(device),
        "copies and checks take their turn in the stream of the training",
    )
    return torch.Stream(device) if is_new else current_stream(device)


def make_wait(stream: torch.Stream, event: Event) -> None:
    """Has the stream wait for the event; without events, this thread waits."""
    if isinstance(event, HostEvent):
        event.synchronize()
    else:
        stream.wait_event(event)


def make_follow(stream: torch.Stream, other: torch.Stream) -> None:
    """Has the stream wait for what is queued in the other; without events, this thread waits."""
    make_wait(stream, recorded(other))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in CPU memory, which has the values once the current stream has come to it."""
    if tensor.is_cpu:
        return tensor
    has_pinned = has(
        tensor.device.type,
        "allocator of page-locked memory",
        lambda: torch.empty(1, device=tensor.device).to("cpu", non_blocking=True),
        "copies to the host are slower",
    )
    if has_pinned:
        return tensor.to("cpu", non_blocking=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor, non_blocking=True)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream in which this thread queues its work for the device."""
    return torch.accelerator.current_stream(device.index)


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Queues the work of this thread in `stream`, as the stream itself does from torch 2.7 on."""
    index = torch.accelerator.current_device_index()
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)  # makes its device the current one
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def wait_for(queued: torch.Stream | Event) -> None:
    """Waits until the device has done what was queued. A thread whose innermost frame is in this
    module waits for the device, which may wait for other ranks (`Interrupter.blocked_in`).
    """
    queued.synchronize()

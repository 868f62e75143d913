"""Streams of the current accelerator, as every version of torch that is supported has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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


def wait_for(queued: torch.Stream | torch.Event) -> None:
    """Waits until the device has done what was queued. A thread whose innermost frame is in this
    module waits for the device, which may wait for other ranks (`Interrupter.blocked_in`).
    """
    queued.synchronize()

"""torch's C++ log is silent while the library breaks connections, and as before afterwards."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from outlast.inprocess.interruption.release import QuietTorchLog
from outlast.system.sockets import shut_down, socket_inodes


def operation_on_a_broken_connection() -> None:
    """torch logs a warning for it, besides the error."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = set(socket_inodes().values())
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    for descriptor, inode in socket_inodes().items():
        if inode not in before:
            shut_down(descriptor, inode)
    with pytest.raises(dist.DistNetworkError):
        client.get("key")


def test_torch_is_silent_until_the_last_one_ends(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = QuietTorchLog(), QuietTorchLog()
    for quiet in (first, first, second):
        quiet.begin()
    operation_on_a_broken_connection()
    first.end()
    operation_on_a_broken_connection()
    assert capfd.readouterr().err == ""
    second.end()
    second.end()
    operation_on_a_broken_connection()
    assert ".cpp:" in capfd.readouterr().err


def test_a_block_that_raises_ends_the_silence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), QuietTorchLog():
        raise KeyError
    operation_on_a_broken_connection()
    assert ".cpp:" in capfd.readouterr().err

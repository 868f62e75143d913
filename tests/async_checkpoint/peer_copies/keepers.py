"""Keepers without a checkpointer, and snapshots for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from outlast.async_checkpoint.peer_copies.arrangement import KeeperClient
from outlast.async_checkpoint.peer_copies.keeper import Keeper as Process
from outlast.async_checkpoint.writer.client import Pending
from outlast.async_checkpoint.writer.handover import SnapshotDescription
from outlast.system.shared_memory import SharedMemory

ADDRESS = "127.0.0.1"
TOKEN = "a" * 64
FAST = 1e12
CHUNK_BYTES = 4 << 20


class Keeper:
    """A keeper of this process."""

    def __init__(self, folder: Path, name: str, linger_s: float = 0.0) -> None:
        self.client = KeeperClient(
            {
                "linger_s": linger_s,
                "launcher": os.getppid(),
                "socket": str(folder / f"copies-{name}.sock"),
                "sockets": str(folder / "copies-*.writer"),
            }
        )
        self.port = 0

    def arrange(self, token: str = TOKEN, bytes_per_s: float = FAST) -> None:
        self.port = self.client.request(
            Process.arrange, address=ADDRESS, token=token, bytes_per_s=bytes_per_s
        )

    @property
    def pid(self) -> int:
        assert self.client.pid is not None
        return self.client.pid

    def held(self) -> list[tuple[int, int]]:
        """Step and rank of each copy."""
        copies = self.client.request(Process.describe_copies)
        return [(copy["step"], copy["rank"]) for copy in copies]

    def send(
        self, to: Keeper, memory: SharedMemory, snapshot: SnapshotDescription, values: bytes = b""
    ) -> Pending[None]:
        return self.client.begin(
            Process.send_copy,
            snapshot=snapshot,
            memory=memory,
            address=ADDRESS,
            port=to.port,
            blob=values,
        )


@contextlib.contextmanager
def keepers(folder: Path, count: int = 2) -> Iterator[list[Keeper]]:
    """Keepers that know one token."""
    folder.chmod(0o700)
    found = [Keeper(folder, str(number)) for number in range(count)]
    try:
        for keeper in found:
            keeper.arrange()
        yield found
    finally:
        for keeper in found:
            keeper.client.close(5.0)


@contextlib.contextmanager
def memory_of(size_bytes: int) -> Iterator[SharedMemory]:
    """Memory in which every page differs."""
    memory = SharedMemory(size_bytes)
    for at in range(0, size_bytes, 4096):
        memory.view[at : at + 8] = at.to_bytes(8, "big")
    yield memory
    memory.close()


def snapshot_of(step: int, size_bytes: int, rank: int = 0, **changes: Any) -> SnapshotDescription:
    """The description of a snapshot with one file of this size."""
    description = {
        "step": step,
        "number": step,
        "save_id": f"save{step}",
        "folder_id": "folder",
        "rank": rank,
        "world_size": 2,
        "working": "w",
        "final": "f",
        "layout": [("__0_0.distcp", 0, size_bytes)],
        "values": "",
        "places": [],
        "socket": "",
        "index": "{}",
        **changes,
    }
    return cast(SnapshotDescription, description)

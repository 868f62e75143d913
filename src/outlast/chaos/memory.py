"""Runs this process out of memory, without harm to the machine.

The process limits its own address space (`RLIMIT_AS`, the soft limit only) slightly above what it
uses, then allocates, and writes to, the rest. The allocation failure is real, and can hit every
thread of the process while it lasts; the machine provides no more than the limit.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import NoReturn

HEADROOM_BYTES = 256 * 2**20
"""The maximum that is allocated before allocation fails."""

_CHUNK_BYTES = 8 * 2**20


def exhaust_memory(headroom_bytes: int = HEADROOM_BYTES) -> NoReturn:
    """Allocates until allocation fails, frees all of it, and restores the limit.

    Raises:
        MemoryError: always.
    """
    previous = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space_bytes() + headroom_bytes
    if previous[0] != resource.RLIM_INFINITY:
        limit = min(limit, previous[0])
    chunks: list[bytes] = []
    resource.setrlimit(resource.RLIMIT_AS, (limit, previous[1]))
    try:
        while True:
            chunks.append(b"\xff" * _CHUNK_BYTES)  # written, so that pages are really allocated
    except MemoryError as error:
        taken = len(chunks) * _CHUNK_BYTES
        # Otherwise the traceback of the new exception would keep them.
        chunks.clear()
        raise MemoryError(f"a planned MemoryError after {taken} bytes") from error
    finally:
        chunks.clear()
        resource.setrlimit(resource.RLIMIT_AS, previous)


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()

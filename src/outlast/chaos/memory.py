"""Runs this process, and nothing else, out of memory.

The process first bounds its own address space (`RLIMIT_AS`, the soft limit only) a little above
what it has, then allocates, and writes to, all that is left. The allocator's refusal is real, and
every thread of the process meets it while it lasts; the machine never lacks more than the bound.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import NoReturn

__all__ = ["HEADROOM_BYTES", "exhaust_memory"]

HEADROOM_BYTES = 256 * 2**20
"""How much is allocated, at most, before the allocator refuses."""

_CHUNK_BYTES = 8 * 2**20


def exhaust_memory(headroom_bytes: int = HEADROOM_BYTES) -> NoReturn:
    """Allocates until the allocator refuses, gives all of it back, and lifts the bound again.

    Raises:
        MemoryError: always.
    """
    old = resource.getrlimit(resource.RLIMIT_AS)
    bound = _address_space_bytes() + headroom_bytes
    if old[0] != resource.RLIM_INFINITY:
        bound = min(bound, old[0])
    chunks: list[bytes] = []
    resource.setrlimit(resource.RLIMIT_AS, (bound, old[1]))
    try:
        while True:
            chunks.append(b"\xff" * _CHUNK_BYTES)  # written to, so that it is memory indeed
    except MemoryError as error:
        taken = len(chunks) * _CHUNK_BYTES
        # Else the traceback of what is raised here would keep it.
        chunks.clear()
        raise MemoryError(f"a planned one: no more after {taken} bytes") from error
    finally:
        chunks.clear()
        resource.setrlimit(resource.RLIMIT_AS, old)


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()

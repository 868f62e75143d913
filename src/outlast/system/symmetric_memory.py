"""torch's symmetric memory: a process that has used it cannot use it after a restart in place.

torch counts the exchanges of its rendezvous in each process, and keeps the store of a group, NCCL's
windows and NVSHMEM's teams by the group's name: all in C++, where nothing takes it back. After a
restart, such a process would wait for its peers, above all for a replacement, under other keys than
they do, or would use their old memory. And no abort ends a kernel that waits for a peer's signal.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

ONCE = "a process that has used torch's symmetric memory cannot use it after a restart"

_BEGINNINGS = ("set_group_info", "empty_strided_p2p", "get_mempool_allocator")
"""The functions of torch's class by which all use begins; older versions lack the last."""

_used = False


def is_used() -> bool:
    """Whether this process has used symmetric memory while its use was `noted`."""
    return _used


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """In this block, `is_used` learns of each use."""
    owner: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "_SymmetricMemory", None)
    found = {name: vars(owner)[name] for name in _BEGINNINGS if hasattr(owner, name)}
    for name, before in found.items():
        setattr(owner, name, staticmethod(_noting(before.__func__)))
    try:
        yield
    finally:
        for name, before in found.items():
            setattr(owner, name, before)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        global _used
        _used = True
        return function(*args, **kwargs)

    return noting

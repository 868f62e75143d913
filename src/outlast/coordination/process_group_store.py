"""The store of a process group, on connections of our own.

A group keeps its store for life, and its backend talks through it at any time. One connection
serves one operation at a time, so a thread that waits on it would hold up the backend and all
other threads: everything here is a connection apart from the group's.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from outlast.coordination import Store, TorchStore
from outlast.errors import StoreError
from outlast.system.error_text import first_line

__all__ = ["connections", "place_in"]

_torch: Any = dist  # its stubs do not name the stores


def place_in(group: Any) -> tuple[int, int, str] | None:
    """This rank, the world size and the group's name; `None` if there is nobody to talk to.

    Raises:
        ValueError: if this rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("a group was given, but no process group is initialized")
        return None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this rank is not in the group")
    return (rank, size, str(_resolved(group).group_name)) if size > 1 else None


def connections(group: Any, count: int) -> list[Store]:
    """New connections to the group's store.

    Raises:
        StoreError: when it cannot be reached.
    """
    store = distributed_c10d._get_process_group_store(_resolved(group))
    base = store
    while isinstance(base, _torch.PrefixStore):
        base = base.underlying_store
    where = f"{base.host}:{base.port}" if isinstance(base, _torch.TCPStore) else type(base).__name__
    try:
        return [TorchStore(_cloned(store, base), where) for _ in range(count)]
    except RuntimeError as e:
        raise StoreError(f"the store at {where} cannot be reached: {first_line(e)}") from e


def _resolved(group: Any) -> Any:
    return distributed_c10d._get_default_group() if group is None else group


def _cloned(store: Any, base: Any) -> Any:
    if hasattr(store, "clone"):  # since torch 2.8
        return store.clone()
    # Before, a prefix cannot be read. Ours has the group's name in it, so none is needed.
    if isinstance(base, _torch.TCPStore):
        return _torch.TCPStore(
            base.host, base.port, is_master=False, wait_for_workers=False, timeout=base.timeout
        )
    if isinstance(base, _torch.FileStore):
        return _torch.FileStore(base.path, -1)
    return base  # in memory: it has no connection, and takes any number of threads

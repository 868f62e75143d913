"""What the ranks of a process group share: a few small collectives, and the group's store.

The backend of a group talks through the group's connection at any time, and a connection serves one
operation at a time: a wait on it would hold up the backend. So all ledgers of a process share one
client per group, on connections of its own.
"""

from __future__ import annotations

import secrets
import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from outlast.coordination.stores.tcp_client import SharedClient
from outlast.coordination.stores.torch_store import TorchStore
from outlast.coordination.waits import waits
from outlast.errors import AsyncCallError


def rank_of(group: Any) -> int:
    """This rank in the group; 0 without a group."""
    return dist.get_rank(group) if _several(group) else 0


def global_rank(group: Any, rank: int) -> int:
    """The global rank of this rank of the group."""
    return rank if group is None else dist.get_global_rank(group, rank)


def least(value: int, group: Any = None) -> int:
    """The minimum of the values of all ranks: a collective. Without a group, the value itself."""
    if not _several(group):
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=device_of(group))
    with waits():
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
        return int(tensor.item())


def first_rank(holds: bool, rank: int, group: Any = None) -> int | None:
    """The first rank on which this holds: a collective."""
    no_rank = 1 << 62
    first = least(rank if holds else no_rank, group)
    return None if first == no_rank else first


def raise_together(
    error: Exception | None,
    what: str,
    rank: int,
    group: Any = None,
    kind: type[Exception] = AsyncCallError,
) -> None:
    """Raises on all ranks if one has an `error`: a collective, and so a barrier. `error` itself
    here, elsewhere a `kind` that names a rank on which `what` happened.
    """
    first = first_rank(error is not None, rank, group)
    if error is not None:
        raise error
    if first is not None:
        raise kind(f"{what} on rank {first}: its own error says why")


def _several(group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def device_of(group: Any) -> torch.device:
    """Where the tensors of this group's collectives are."""
    resolved: Any = dist.group.WORLD if group is None else group
    kinds = [device.type for device in resolved._device_types]
    # NCCL takes only tensors on the GPU; gloo takes both, and those on the CPU need no copy.
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


_torch: Any = dist  # its stubs do not name the stores


class _Shared:
    """What the ledgers of one process group share in this process.

    The number and the counts live as long as the group. They must not end with the last ledger:
    that moment depends on the garbage collector and differs between ranks, and then one rank would
    enter the all-reduce of `unique_prefix` and another would not. The connections do end with the
    last ledger that uses them, or with its last blocked wait.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.ledgers: Counter[str] = Counter()  # how many were made, by purpose
        self.store: weakref.ref[SharedClient | TorchStore] | None = None


_shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()  # by group


def place_in(group: Any) -> tuple[int, int, str] | None:
    """This rank, the world size, the group's name; `None` alone, a `ValueError` outside it."""
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("a group was given, but no process group is initialized")
        return None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this rank is not in the group")
    return (rank, size, str(_resolved(group).group_name)) if size > 1 else None


def unique_prefix(purpose: str, group: Any) -> str:
    """A prefix for the keys of one ledger, equal on all ranks and never used before.

    All ranks make the ledgers of a group in the same order, for the life of the group: the first
    one is a collective, in which they agree on a random number, and each rank counts the ledgers of
    each purpose. The number is needed because a store may outlive a group, and a launcher that
    restarts all workers keeps it: no verdict of an earlier ledger must be taken for one of this.
    """
    resolved = _resolved(group)
    shared = _shared.setdefault(resolved, _Shared())
    if shared.number is None:
        shared.number = least(secrets.randbits(62), group)
    shared.ledgers[purpose] += 1
    count = shared.ledgers[purpose]
    return f"outlast/{purpose}/{resolved.group_name}/{shared.number:x}/{count}"


def shared_store(group: Any) -> SharedClient | TorchStore:
    """The store that all ledgers of this group share in this process. Not a collective."""
    resolved = _resolved(group)
    shared = _shared.setdefault(resolved, _Shared())
    store: SharedClient | TorchStore | None
    store = None if shared.store is None else shared.store()
    if store is None:
        base = distributed_c10d._get_process_group_store(resolved)
        while isinstance(base, _torch.PrefixStore):
            base = base.underlying_store
        if isinstance(base, _torch.TCPStore):
            # Not torch's client: connections end while they are used, in a restart in place or with
            # the rank that serves the store.
            store = SharedClient(base.host, base.port, base.timeout.total_seconds())
            store.connect()
        else:
            store = TorchStore(base, type(base).__name__)
        shared.store = weakref.ref(store)
    return store


def _resolved(group: Any) -> Any:
    return distributed_c10d._get_default_group() if group is None else group

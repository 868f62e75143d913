"""What the ranks of a process group share: a few small collectives, and the group's store.

The backend of a group talks through the group's connection at any time, and a connection serves one
operation at a time: a wait on it would hold up the backend. So all ledgers of a process share one
`GroupStore` per group, on connections of its own.
"""

from __future__ import annotations

import secrets
import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from outlast.coordination import KeyTimeout, TorchStore
from outlast.coordination.stores.tcp_client import TcpClient
from outlast.errors import AsyncCallError, StoreError
from outlast.system.error_text import first_line


def rank_of(group: Any) -> int:
    """This rank in the group; 0 without a group."""
    return dist.get_rank(group) if _several(group) else 0


def least(value: int, group: Any = None) -> int:
    """The minimum of the values of all ranks: a collective. Without a group, the value itself."""
    if not _several(group):
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=_device(group))
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return int(tensor.item())


def raise_together(error: Exception | None, what: str, rank: int, group: Any = None) -> None:
    """Raises on every rank if one has an error: a collective, and so a barrier too.

    Raises:
        Exception: `error`, if this rank has one.
        AsyncCallError: on the other ranks; names one on which `what` happened.
    """
    no_rank = 1 << 62
    first = least(no_rank if error is None else rank, group)
    if error is not None:
        raise error
    if first != no_rank:
        raise AsyncCallError(f"{what} on rank {first}: its own error says why")


def _several(group: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _device(group: Any) -> torch.device:
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
        self.store: weakref.ref[GroupStore] | None = None


_shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()  # by group


def place_in(group: Any) -> tuple[int, int, str] | None:
    """This rank, the world size and the group's name; `None` for a process alone.

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


def unique_prefix(purpose: str, group: Any) -> str:
    """A prefix for the keys of one ledger, equal on all ranks and never used before.

    All ranks make the ledgers of a group in the same order, for the life of the group: the first
    one is a collective, in which they agree on a random number, and each rank counts the ledgers
    of each purpose. The number is needed because a store may outlive a group, and a launcher that
    restarts all workers keeps it: the verdict on a call of an earlier ledger must never be taken
    for one of this ledger.
    """
    resolved = _resolved(group)
    shared = _shared.setdefault(resolved, _Shared())
    if shared.number is None:
        shared.number = least(secrets.randbits(62), group)
    shared.ledgers[purpose] += 1
    count = shared.ledgers[purpose]
    return f"outlast/{purpose}/{resolved.group_name}/{shared.number:x}/{count}"


def shared_store(group: Any) -> GroupStore:
    """The store that all ledgers of this group share in this process. Not a collective."""
    resolved = _resolved(group)
    shared = _shared.setdefault(resolved, _Shared())
    store = None if shared.store is None else shared.store()
    if store is None:
        store = GroupStore(distributed_c10d._get_process_group_store(resolved))
        shared.store = weakref.ref(store)
    return store


class GroupStore:
    """A `Store` for any number of threads, on few connections.

    Operations that the server answers at once share one connection: torch lets them take turns. A
    wait has a connection to itself, since it occupies the connection until the key appears. One
    connection for several waits would let one waiter hold up another, forever if the second waits
    for what the first thread's rank says only after its own wait has ended. torch can wait for
    several keys only until *all* of them exist, so one thread could not serve several waiters
    either. Therefore a wait takes an idle connection, or opens one if there is none, and returns it
    afterwards: there are as many waiting connections as there were ever simultaneous waits, and
    only two connections in all where waits never overlap.

    A connection to a TCP store is one of `TcpClient`, because connections end while they are used
    (a restart in place, the death of the rank that serves the store); to any other store, it is a
    clone of the first one and not of the group's: nothing here keeps the store of a destroyed group
    alive. A wait that is blocked then ends as soon as its key appears (an abort fails the call,
    which sets the key) or the server ends, and with it the connections.
    """

    def __init__(self, store: Any) -> None:
        base = _base(store)
        self._tcp = isinstance(base, _torch.TCPStore)
        self._where = f"{base.host}:{base.port}" if self._tcp else type(base).__name__
        if self._tcp:
            self._address = base.host, base.port, base.timeout.total_seconds()
        self._first = self._connect(store)
        self._idle = [self._connect(store)]  # taken and returned without a lock: see `wait_for`
        self.put, self.claim, self.read = self._first.put, self._first.claim, self._first.read
        self.add, self.append = self._first.add, self._first.append
        self.delete = self._first.delete

    def wait_for(self, key: str, timeout: float | None) -> bytes:
        """Any number of threads may wait at the same time."""
        try:
            connection = self._idle.pop()
        except IndexError:  # in one step: another thread may have taken the last one just now
            # torch's client would try for minutes to connect to a server that is gone; the
            # connection that exists reports its end at once.
            value = self.read(key)
            if value is not None:
                return value
            connection = self._connect(getattr(self._first, "torch_store", None))
        try:
            value = connection.wait_for(key, timeout)
        except KeyTimeout:
            self._idle.append(connection)
            raise
        # After any other error, or an interrupt, an answer may be half read: the connection goes.
        self._idle.append(connection)
        return value

    def _connect(self, store: Any) -> TcpClient | TorchStore:
        if self._tcp:
            client = TcpClient(*self._address)
            client.connect()
            return client
        try:
            return TorchStore(_cloned(store, _base(store)), self._where)
        except RuntimeError as e:
            raise StoreError(
                f"the store at {self._where} cannot be reached: {first_line(e)}"
            ) from e


def _resolved(group: Any) -> Any:
    return distributed_c10d._get_default_group() if group is None else group


def _base(store: Any) -> Any:
    while isinstance(store, _torch.PrefixStore):
        store = store.underlying_store
    return store


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
    return base  # in memory: it has no connection, and serves any number of threads

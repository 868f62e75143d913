"""The replicas of the job, and the steps that they take together: one that fails fails on all.

With a process group of several ranks, its ranks are the replicas; all of them make the calls of
this package in the same order. Without one, each replica is alone, and the environment determines
which one writes.
"""

from __future__ import annotations

import datetime
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from outlast.coordination import collectives
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger, connect_ledger
from outlast.elastic import environment
from outlast.errors import CheckpointError, OutlastError, RankTimeout
from outlast.inprocess.abort import interrupt_collectives
from outlast.system.error_text import describe, traceback_text
from outlast.system.units import late_text

T = TypeVar("T")

TIMEOUT = datetime.timedelta(minutes=30)


class Replicas:
    """The replicas of the job, seen from this one. One thread at a time may use this object."""

    def __init__(self, ledger: CallLedger, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.writes = rank, world_size, rank == 0
        self.several = ledger.world_size > 1
        self._ledger = ledger
        self.ranks = Agreement(
            ledger,
            TIMEOUT.total_seconds(),
            "the states",
            late=RankTimeout,
            interrupt=interrupt_collectives,
        )
        self._within: Replicas | None = None

    @property
    def current(self) -> bool:
        """Whether these are still the replicas of the job: a restart in place makes new ones."""
        group = _group()
        return not self.several or (group is not None and _known.get(group) is self)

    def together(self, what: str, work: Callable[[], T], *, collective: bool = False) -> T:
        """Calls `work` (in errors: `what`), and returns when all replicas have finished theirs.
        `collective`: it may wait for the others in collectives; if one has failed, the process
        groups cannot be used afterwards. On every replica, a `CheckpointError` if `work` raised on
        one (names it and the cause), a `RankTimeout` if one did not come in time.
        """
        return self.ranks.together(lambda: self._complete(work), what, collective=collective)

    def gather(
        self,
        what: str,
        part: Any,
        decide: Callable[[list[Any]], T],
        *,
        until_read: bool = False,
    ) -> T:
        """Collects a part from every replica, calls `decide` on rank 0, returns its result on all.

        Part and result are JSON. `until_read`: see `Agreement`. Raises as `together`.
        """

        def work(parts: list[Any]) -> T:
            return self._complete(lambda: decide(parts))

        return self.ranks.gather(part, work, what, until_read=until_read)

    def within(self) -> Replicas:
        """The same replicas, for a step inside the work of a step of these."""
        if self._within is None:
            self._within = Replicas(self._ledger.child("within"), self.rank, self.world_size)
        self._within.ranks.timeout_s = self.ranks.timeout_s
        return self._within

    def _complete(self, work: Callable[[], T]) -> T:
        """Calls `work`; whatever it raises becomes an error with a complete message."""
        try:
            return work()
        except CheckpointError:
            raise
        except Exception as e:
            text = f"{describe(e)}\n{traceback_text(e).rstrip()}" if self.several else describe(e)
            raise CheckpointError(text) from e


_known: weakref.WeakKeyDictionary[Any, Replicas] = weakref.WeakKeyDictionary()  # by process group


def current(timeout: datetime.timedelta | None = None) -> Replicas:
    """The current replicas. With a process group, all of its ranks must make this call in the same
    order: the first connects them, for as long as the group lives. `timeout` is that of each wait
    from now on; unchanged by default.
    """
    group = _group()
    if group is None:
        rank, world_size = environment.replica_rank(), environment.num_replicas()
        return Replicas(connect_ledger("elastic"), rank, world_size)
    found = _known.get(group)
    if found is None:
        ledger = _connect(group, timeout or TIMEOUT)
        found = _known[group] = Replicas(ledger, ledger.rank, ledger.world_size)
    if timeout is not None:
        found.ranks.timeout_s = timeout.total_seconds()
    return found


def _group() -> Any:
    """The default process group, if it has several ranks."""
    import torch.distributed as dist

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.distributed_c10d._get_default_group() if several else None


def _connect(group: Any, timeout: datetime.timedelta) -> CallLedger:
    """Same as `connect_ledger`, but waits no longer than `timeout`: it is a collective, so each
    rank first sets a key in the group's store. A `RankTimeout` names the ranks whose keys are
    missing (the process groups cannot be used afterwards); a `CheckpointError` says that the ranks
    cannot reach each other.
    """
    place = collectives.place_in(group)
    assert place is not None
    rank, world_size, name = place
    store = collectives.shared_store(group)
    keys = [f"outlast/elastic-there/{name}/{other}" for other in range(world_size)]
    store.put(keys[rank], b"1")
    late, left = threading.Event(), threading.Event()

    def interrupt() -> None:
        late.set()
        interrupt_collectives(left)

    timer = threading.Timer(timeout.total_seconds(), interrupt)
    timer.daemon = True
    timer.start()
    try:
        ledger = connect_ledger("elastic", group)
    except OutlastError:
        raise
    except RuntimeError as e:
        if not late.is_set():
            raise CheckpointError(f"rank {rank} cannot reach the other ranks: {e}") from e
        missing = [other for other, key in enumerate(keys) if store.read(key) is None]
        what = "the first call of outlast.elastic"
        raise RankTimeout(late_text(what, missing, timeout.total_seconds(), rank)) from e
    finally:
        left.set()
        timer.cancel()
        timer.join()
    store.delete(keys[rank])
    return ledger

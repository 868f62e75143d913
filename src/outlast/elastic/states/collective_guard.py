"""Interrupts collectives that other replicas may never enter, and connects the ranks of a process
group.

If a `sync` raises on one replica, the others remain in the collective that it did not enter, for
the group's timeout: 30 minutes by default. Once the call is known to have failed, and a thread does
not leave it by itself, gloo's connections are shut down, so every in-flight collective raises. NCCL
collectives do not block the calling thread.

The first call of a process group, in which its ranks connect, is such a collective. So each rank
first sets a key in the group's store: when the time is up, those whose keys are missing are named.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from outlast.coordination import collectives
from outlast.coordination.call_ledger import CallLedger, connect_ledger
from outlast.errors import CheckpointError, OutlastError, RankTimeout
from outlast.inprocess.abort import interrupt_collectives
from outlast.system.units import rank_names

log = logging.getLogger("outlast.elastic")

GRACE_S = 3.0
"""How long a thread may take to leave by itself, once the call has failed."""


@contextlib.contextmanager
def collective_guard(over: threading.Event, grace_s: float = GRACE_S) -> Iterator[None]:
    """Guards a block in which a thread may be in a collective. `over`: the call has ended for all
    replicas; if a thread is still in the block after `grace_s` seconds, a replica has failed.
    """
    left = threading.Event()

    def watch() -> None:
        over.wait()
        if not left.wait(grace_s):
            log.warning("a replica has failed: the collectives that wait for it are interrupted")
            interrupt_collectives(left)

    threading.Thread(target=watch, name="outlast-guard", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def connect(prefix: str, group: Any, timeout: datetime.timedelta) -> CallLedger:
    """Same as `connect_ledger`, but waits no longer than `timeout`. A `RankTimeout` names the ranks
    that did not make the call (the process groups cannot be used afterwards); a `CheckpointError`
    says that the ranks cannot reach each other.
    """
    place = collectives.place_in(group)
    assert place is not None
    rank, world_size, name = place
    store = collectives.shared_store(group)
    keys = [f"outlast/{prefix}-there/{name}/{other}" for other in range(world_size)]
    store.put(keys[rank], b"1")
    time_is_up = threading.Event()
    timer = threading.Timer(timeout.total_seconds(), time_is_up.set)
    timer.daemon = True
    timer.start()
    try:
        with collective_guard(time_is_up, 0.0):
            ledger = connect_ledger(prefix, group)
    except OutlastError:
        raise
    except RuntimeError as e:
        if not time_is_up.is_set():
            raise CheckpointError(f"rank {rank} cannot reach the other ranks: {e}") from e
        missing = [other for other, key in enumerate(keys) if store.read(key) is None]
        raise late("the first call of outlast.elastic", missing, timeout, rank) from e
    finally:
        timer.cancel()
        timer.join()
        time_is_up.set()  # ends the thread of the guard
    store.delete(keys[rank])
    return ledger


def late(what: str, missing: Sequence[int], timeout: datetime.timedelta, rank: int) -> RankTimeout:
    """The error of `rank`, which has waited for the missing ranks."""
    return RankTimeout(
        f"{what}: {rank_names(missing)} did not make the call within {timeout}, rank {rank} waited"
    )

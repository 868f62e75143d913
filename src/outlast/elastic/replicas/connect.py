"""The first call, in which the ranks of a process group connect: a collective.

A rank that never comes would leave the others in it for the timeout of the group. So each says on
the group's store that it is there, and when the time is over those that came end the collective,
and name those that did not. What they said is taken back when they have met.
"""

from __future__ import annotations

import datetime
import threading
from typing import Any

from outlast.coordination import Store, process_group_store
from outlast.coordination.call_ledger import CallLedger, connect_ledger
from outlast.elastic.replicas.collective_guard import CollectiveGuard
from outlast.errors import CheckpointError, OutlastError, TimeoutError

__all__ = ["connect"]


def connect(prefix: str, group: Any, timeout: datetime.timedelta) -> CallLedger:
    """As `connect_ledger`, but it does not wait longer than `timeout`.

    Raises:
        TimeoutError: naming the ranks that did not come. The process groups are of no use then.
        CheckpointError: if the ranks cannot talk to each other.
    """
    place = process_group_store.place_in(group)
    assert place is not None
    rank, world_size, name = place
    store = process_group_store.shared_store(group)
    keys = [f"outlast/{prefix}-there/{name}/{other}" for other in range(world_size)]
    store.put(keys[rank], b"1")
    late = threading.Event()
    alarm = threading.Timer(timeout.total_seconds(), late.set)
    alarm.daemon = True
    alarm.start()
    try:
        with CollectiveGuard(late, 0.0):
            ledger = connect_ledger(prefix, group)
    except OutlastError:
        raise
    except RuntimeError as e:
        if not late.is_set():
            raise CheckpointError(f"rank {rank} cannot reach the other ranks: {e}") from e
        missing = _missing(store, keys)
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        raise TimeoutError(
            f"the first call of outlast.elastic: {ranks} did not get there within {timeout}, "
            f"rank {rank} waited"
        ) from e
    finally:
        alarm.cancel()
        alarm.join()
        late.set()  # ends the thread of the guard
    store.delete(keys[rank])
    return ledger


def _missing(store: Store, keys: list[str]) -> list[int]:
    return [rank for rank, key in enumerate(keys) if store.read(key) is None]

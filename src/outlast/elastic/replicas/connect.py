"""The first call of a process group, in which its ranks connect: a collective with a timeout.

If a rank never makes the call, the others would block in the collective for the timeout of the
group. So each rank first sets a key in the group's store. When the time is up, the ranks that made
the call end the collective, and name the ranks whose keys are missing. The keys are deleted once
all ranks are connected.
"""

from __future__ import annotations

import datetime
import threading
from typing import Any

from outlast.coordination import Store, process_group_store
from outlast.coordination.call_ledger import CallLedger, connect_ledger
from outlast.elastic.replicas.collective_guard import CollectiveGuard
from outlast.errors import CheckpointError, OutlastError, TimeoutError


def connect(prefix: str, group: Any, timeout: datetime.timedelta) -> CallLedger:
    """As `connect_ledger`, but waits no longer than `timeout`.

    Raises:
        TimeoutError: names the ranks that did not make the call. The process groups cannot be used
            afterwards.
        CheckpointError: if the ranks cannot reach each other.
    """
    place = process_group_store.place_in(group)
    assert place is not None
    rank, world_size, name = place
    store = process_group_store.shared_store(group)
    keys = [f"outlast/{prefix}-there/{name}/{other}" for other in range(world_size)]
    store.put(keys[rank], b"1")
    late = threading.Event()
    timer = threading.Timer(timeout.total_seconds(), late.set)
    timer.daemon = True
    timer.start()
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
            f"the first call of outlast.elastic: {ranks} did not make the call within {timeout}, "
            f"rank {rank} waited"
        ) from e
    finally:
        timer.cancel()
        timer.join()
        late.set()  # ends the thread of the guard
    store.delete(keys[rank])
    return ledger


def _missing(store: Store, keys: list[str]) -> list[int]:
    return [rank for rank, key in enumerate(keys) if store.read(key) is None]

"""Exchanges group keys between ranks, through the store."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Collection
from typing import Any

import torch.distributed as dist

from outlast.errors import RankTimeout, StoreError
from outlast.inprocess.state import State


class KeyExchange:
    """Gives each healthy rank the keys of all healthy ranks.

    There may be several exchanges in one iteration (by node, then by rack). Each rank numbers its
    exchanges in the store, so one rank's nth exchange matches another's nth, regardless of the
    objects that make them. This works because all ranks run the same policies; a rank marked by an
    earlier exchange takes part in no later one, and no rank waits for it. Between two exchanges, a
    policy may drop marked ranks and change the ranks of the others. The world size is lower then,
    so it separates the exchanges of one rank number from those of its former holder.

    A rank deletes the keys that it wrote in earlier iterations, which all ranks have left.
    """

    def __init__(self) -> None:
        self._written: list[tuple[int, str]] = []

    def exchange(
        self, state: State, key: str, healthy: Collection[int], timeout: float
    ) -> dict[int, str]:
        """Publishes `key` as the key of `state.rank`, and waits for those of all `healthy` ranks.

        Raises:
            RankTimeout: naming the ranks that did not publish within `timeout` seconds.
            StoreError: if the store fails.
        """
        store = state.store
        if store is None:
            raise ValueError("state.store is None: keys are exchanged through a store")
        try:
            self._forget_before(state.iteration, store)
            keys = self._publish(state, key, healthy)
            missing = _await(store, keys, timeout)
            if not missing:
                values = store.multi_get(list(keys.values()))
                return {r: bytes(v).decode() for r, v in zip(keys, values, strict=True)}
        except (dist.DistError, RuntimeError) as e:
            raise StoreError(
                f"rank {state.rank}: the group keys of iteration {state.iteration} cannot be "
                f"exchanged: {e}"
            ) from e
        raise RankTimeout(
            f"rank {state.rank}: FilterGroupedByKey: in iteration {state.iteration}, ranks "
            f"{missing} did not publish their keys within timeout={timeout} s"
        )

    def _publish(self, state: State, key: str, healthy: Collection[int]) -> dict[int, str]:
        """Writes the key; returns the names of all ranks' keys, by rank."""
        prefix = f"outlast/group/{state.iteration}/{state.world_size}"
        counter = f"{prefix}/exchanges/{state.rank}"
        number = state.store.add(counter, 1)
        keys = {rank: f"{prefix}/{number}/{rank}" for rank in sorted(healthy)}
        state.store.set(keys[state.rank], key)
        self._written += [(state.iteration, counter), (state.iteration, keys[state.rank])]
        return keys

    def _forget_before(self, iteration: int, store: Any) -> None:
        for written, key in self._written:
            if written < iteration:
                with contextlib.suppress(RuntimeError):  # not every store can delete a key
                    store.delete_key(key)
        # The rest belongs to this iteration, or to a wrapped call that is over.
        self._written = [entry for entry in self._written if entry[0] == iteration]


def _await(store: Any, keys: dict[int, str], timeout: float) -> list[int]:
    """Waits for `keys`; returns the ranks whose key is missing after `timeout`."""
    try:
        store.wait(list(keys.values()), datetime.timedelta(seconds=timeout))
    except dist.DistNetworkError:
        raise
    except (dist.DistError, RuntimeError):  # FileStore reports a timeout as a RuntimeError
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        if missing:
            return missing
    return []

"""Releases the resources of process groups, in the function's thread after it left the function.

Calling `destroy_process_group()` is not enough, for three reasons:

* A gloo worker thread may still be blocked (`gloo_abort.py`). Its group's destructor would wait for
  that thread and, if a DDP module holds the last reference to the group, would hold the GIL while
  waiting. Therefore references to the groups are kept from the abort on, and their threads are
  woken before anything is destroyed.
* gloo's event loops wake up only every 10 ms, and the destructor waits for them. No rank needs to
  wait for the destructor: a separate thread drops the references. torch's destructor of a group
  runs without the GIL.
* torch's records of groups whose creation or destruction was interrupted must be cleared, above all
  the counter that names groups: if the ranks' counters differ, each waits for the others under a
  different name.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from outlast.inprocess.distributed import gloo_sockets
from outlast.inprocess.distributed.gloo_abort import GlooAbort, any_blocked

log = logging.getLogger("outlast.inprocess")

_DRAIN_S = 5.0
"""How long worker threads may take to leave their waits before the release continues."""


class Releaser:
    """Releases the groups of each iteration."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._thread: threading.Thread | None = None
        self._sockets: set[int] = set()

    def hold(self) -> None:
        """Keeps groups alive until `release()`. Called in the monitor thread, before the abort."""
        if dist.is_available():
            self._held.extend(list(dist.distributed_c10d._world.pg_map))

    def release(self) -> None:
        """Destroys all groups. Their descriptors and threads go away a moment later (`join`)."""
        self.join()
        if not dist.is_available():
            return
        held, self._held = self._held, []
        held.extend(list(dist.distributed_c10d._world.pg_map))
        if held:
            _drain()
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception:
                log.exception("a process group could not be destroyed; the restart continues")
        _forget_groups()
        if held:
            self._sockets = set(gloo_sockets.pair_sockets().values())
            self._thread = threading.Thread(target=held.clear, name="outlast-release", daemon=True)
            del held  # the thread holds the last reference to the list
            self._thread.start()
        if torch.cuda.is_initialized():
            # The next iteration needs the memory of this one's models, reference cycles included.
            self.join()
            gc.collect()

    def join(self) -> None:
        """Waits until the released resources are freed. Collects garbage if a reference cycle in
        user code still holds a group.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._sockets & set(gloo_sockets.pair_sockets().values()):
            gc.collect()

    def end(self) -> None:
        """Ends the call, which leaves no group behind: there was none before it, and a group cannot
        be used for long after it, because its store ends with the call. So the function, or
        another one that makes its own group, can be called next.
        """
        self.release()
        self.join()


def _drain() -> None:
    """Waits until gloo's threads have left their waits; usually the first check finds none."""
    gloo = GlooAbort()
    deadline = time.monotonic() + _DRAIN_S
    while any_blocked() and time.monotonic() < deadline:
        gloo.wake_blocked(settled=not gloo.shut_down())
        time.sleep(0.002)  # no event is signaled when a gloo thread leaves a wait


def _forget_groups() -> None:
    """Clears torch's records of process groups."""
    c10d = dist.distributed_c10d
    c10d._update_default_pg(None)
    for name in (
        "pg_map",
        "pg_names",
        "pg_group_ranks",
        "pg_backend_config",
        "pg_to_tag",
        "tags_to_pg",
        "pg_coalesce_state",
    ):
        getattr(c10d._world, name).clear()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    c10d._world.group_count = 0

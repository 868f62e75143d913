"""Gives back what process groups hold, in the function's thread after it has left the function.

Three things make it more than a call of `destroy_process_group()`:

* A worker thread of gloo may still wait for something that will never come
  (`distributed/gloo_blocked_waits.py`). The
  destructor of its group would wait for that thread, and, where a DDP module holds the group's last
  reference, hold the GIL meanwhile. So groups are held from the abort on, and their threads are
  woken before anything is destroyed.
* gloo's event loops look up every 10 ms only, and the destructor waits for them. Nobody needs to
  wait for the destructor: a thread of its own drops the references. torch's destructor of a group
  runs without the GIL.
* What torch keeps of groups whose making or destruction was interrupted is cleared. Above all the
  count that names groups: where ranks count differently, each waits for the others under another
  name.
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
from outlast.inprocess.distributed.gloo_blocked_waits import ForgottenWaits
from outlast.system.sockets import shut_down

__all__ = ["Releaser"]

log = logging.getLogger("outlast.inprocess")

_DRAIN_S = 5.0
"""How long worker threads may take to come out of their waits, before the release goes on."""


class Releaser:
    """Releases the groups of one iteration after another."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._thread: threading.Thread | None = None
        self._sockets: set[int] = set()

    def hold(self) -> None:
        """Called before the abort, in another thread: keeps the groups alive until `release()`."""
        if dist.is_available():
            self._held.extend(list(dist.distributed_c10d._world.pg_map))

    def release(self) -> None:
        """Destroys all groups. Descriptors and threads are gone a moment later (`join`)."""
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
                log.exception("a process group could not be destroyed; the restart goes on")
        _forget_groups()
        if held:
            self._sockets = set(gloo_sockets.pair_sockets().values())
            self._thread = threading.Thread(target=held.clear, name="outlast-release", daemon=True)
            del held  # the thread's is the last reference to the list
            self._thread.start()
        if torch.cuda.is_initialized():
            # The next iteration needs the memory of this one's models, also what is in cycles.
            self.join()
            gc.collect()

    def join(self) -> None:
        """Waits until what was released is gone. A cycle in user code may still hold a group:
        then the garbage is collected.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._sockets & set(gloo_sockets.pair_sockets().values()):
            gc.collect()


def _drain() -> None:
    """Lets gloo's threads come out of their waits; usually they are out at the first look."""
    forgotten = ForgottenWaits()
    deadline = time.monotonic() + _DRAIN_S
    while forgotten.waiting() and time.monotonic() < deadline:
        for descriptor, inode in gloo_sockets.pair_sockets().items():
            shut_down(descriptor, inode)
        forgotten.wake(settled=not gloo_sockets.pair_sockets())
        time.sleep(0.002)  # nothing tells when a thread of gloo has come out of a wait


def _forget_groups() -> None:
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

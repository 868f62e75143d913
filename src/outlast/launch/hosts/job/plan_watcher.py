"""A thread that waits for the agents' decisions, and wakes the event loop of this host's agent."""

from __future__ import annotations

import contextlib
import os
import queue
import threading

from outlast.coordination.stores.store import Store
from outlast.errors import StoreError
from outlast.launch.hosts.job.job_log import plan_key


class PlanWatcher:
    """The entries of the chain from number `first` on. `fd` is readable when there may be one."""

    def __init__(self, store: Store, first: int) -> None:
        self._store, self._first = store, first
        self._entries: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self.fd, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A daemon: if the store never answers, the wait must not keep the process alive.
        self._thread = threading.Thread(target=self._watch, name="plan watcher", daemon=True)
        self._thread.start()

    def take(self) -> list[tuple[int, bytes]]:
        """The entries that have not been taken yet, with their numbers."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._entries.get_nowait())
        return found

    def close(self) -> None:
        """Release the descriptors, once the store is closed, which has ended the thread's wait."""
        self._thread.join()
        os.close(self.fd)
        os.close(self._wake)

    def _watch(self) -> None:
        number = self._first
        # The agent meets the same error in its own operations, and handles it there.
        with contextlib.suppress(StoreError):
            while True:
                self._entries.put((number, self._store.wait_for(plan_key(number), None)))
                number += 1
                with contextlib.suppress(BlockingIOError):  # it is full: the agent will wake
                    os.write(self._wake, b"\0")
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

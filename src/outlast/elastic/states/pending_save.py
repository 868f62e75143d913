"""A save that goes on in the background: one at a time.

The thread is no daemon: a program that ends waits for what is being written.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable

from outlast.async_checkpoint.handle import Handle
from outlast.elastic.replicas.replica_group import Replicas

__all__ = ["PendingSave", "drain", "ended", "start"]

STALE_S = 10.0
"""How long to wait for a save of replicas that are no more."""

log = logging.getLogger("outlast.elastic")


class PendingSave(Handle):
    """A save of all states that is under way. Any thread may use it."""

    def __init__(self, replicas: Replicas | None = None) -> None:
        super().__init__()
        self._replicas = replicas
        self._directory: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def directory(self) -> str | None:
        """The checkpoint, once it is committed; `None` where this replica does not know it."""
        return self._directory

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Waits until the checkpoint is committed.

        Raises:
            TimeoutError: when that takes longer than `timeout`.
            CheckpointError: when the save has failed; naming rank, host and cause.
        """
        try:
            self._outcome(timeout, "the states are")
        finally:
            if self.done:
                self._join()

    def _await(self) -> None:
        self._await_end(None)
        self._join()

    def _join(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _is_stale(self) -> bool:
        """Whether its replicas are no more; it has ended then."""
        replicas = self._replicas
        if replicas is None or replicas.current:
            return False
        if not self._await_end(STALE_S):
            replicas.give_up()
            self._await()
        return True

    def _run(self, work: Callable[[], str | None]) -> None:
        error: Exception | None = None
        try:
            self._directory = work()
        except Exception as e:  # noqa: BLE001 - for whoever asks the handle
            log.error("a save in the background failed: %s", e)
            error = e
        self._end(error)

    def __repr__(self) -> str:
        return f"<PendingSave {self._state}>"


_last: PendingSave | None = None


def start(replicas: Replicas, work: Callable[[], str | None]) -> PendingSave:
    """Runs `work`, in which the replicas talk, in the background. The one before has ended."""
    global _last
    handle = PendingSave(replicas)
    handle._thread = threading.Thread(target=handle._run, args=(work,), name="outlast-states")
    handle._thread.start()
    _last = handle
    return handle


def ended(directory: str | None) -> PendingSave:
    """A save that was done at once."""
    handle = PendingSave()
    handle._run(lambda: directory)
    return handle


def drain(*, quiet: bool = False) -> None:
    """Waits for the save that is under way.

    One of replicas that are no more, after a restart in place, is waited for a while; how it ended
    is in the log.

    Args:
        quiet: whether it does not matter how it ended.

    Raises:
        CheckpointError: if it failed, and nobody has asked its handle.
    """
    global _last
    handle = _last
    if handle is None:
        return
    if handle._is_stale():
        _last = None
        return
    handle._await()
    if quiet:
        return
    _last = None
    if not handle._seen:
        handle.wait()

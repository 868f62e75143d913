"""A save that goes on in the background: one at a time.

The thread is no daemon: a program that ends waits for what is being written.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable

from outlast.elastic.replicas import Replicas
from outlast.errors import TimeoutError

__all__ = ["PendingSave", "drain", "ended", "start"]

STALE_S = 10.0
"""How long to wait for a save of replicas that are no more."""

log = logging.getLogger("outlast.elastic")


class PendingSave:
    """A save of all states that is under way. Any thread may use it."""

    def __init__(self, replicas: Replicas | None = None) -> None:
        self._replicas = replicas
        self._ended = threading.Event()
        self._directory: str | None = None
        self._error: Exception | None = None
        self._seen = False
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended: committed, or failed, on all replicas."""
        return self._ended.is_set()

    @property
    def exception(self) -> Exception | None:
        """Why it failed; `None` while it is under way, and if it did not. An error that was looked
        at is not raised again by the next save.
        """
        self._seen = self._seen or self.done
        return self._error

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
        self._await(timeout)
        self._seen = True
        if self._error is not None:
            raise self._error

    def _await(self, timeout: datetime.timedelta | None = None) -> None:
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError(f"the states are not committed after {timeout}")
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _is_stale(self) -> bool:
        """Whether its replicas are no more; it has ended then."""
        replicas = self._replicas
        if replicas is None or replicas.current:
            return False
        if not self._ended.wait(STALE_S):
            replicas.give_up()
            self._await()
        return True

    def _run(self, work: Callable[[], str | None]) -> None:
        try:
            self._directory = work()
        except Exception as e:  # noqa: BLE001 - for whoever asks the handle
            log.error("a save in the background failed: %s", e)
            self._error = e
        self._ended.set()

    def __repr__(self) -> str:
        state = "under way" if not self.done else "failed" if self._error else "committed"
        return f"<PendingSave {state}>"


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

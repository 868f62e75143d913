"""Background saves of states: one at a time.

The thread is not a daemon, so a program that ends waits for the save in progress.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from outlast.async_checkpoint.handle import Handle
from outlast.elastic.states.replicas import Replicas
from outlast.errors import CheckpointError, StoreError
from outlast.system.arguments import Duration

STALE_S = 10.0
"""How long to wait for a save whose replicas no longer exist."""

log = logging.getLogger("outlast.elastic")


class PendingSave(Handle["str | None"]):
    """A save of all states in the background. Any thread may use it.

    Its result is the directory of the checkpoint; `None` on a replica that does not know it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None

    @property
    def directory(self) -> str | None:
        """The checkpoint, once it is committed; `None` on a replica that does not know it."""
        return super().result(0.0) if self.done() and self._failure() is None else None

    def wait(self, timeout: Duration | None = None) -> None:
        """Waits until the checkpoint is committed.

        Raises:
            TimeoutError: if it is not committed within `timeout`.
            CheckpointError: if the save has failed; names rank, host and cause.
        """
        self.result(timeout)

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """Waits for the end of the save, and returns its error; `None` if it is committed. A
        `TimeoutError` as `wait`.
        """
        try:
            return super().exception(timeout)
        finally:
            if self.done():
                self._join()

    def _what(self) -> str:
        return "the states are"

    def _join(self) -> None:
        """Waits until the save has ended, and its thread with it. Raises nothing."""
        self._await_end(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, work: Callable[[], str | None]) -> None:
        directory: str | None = None
        error: Exception | None = None
        try:
            directory = work()
        except Exception as e:  # noqa: BLE001 - raised by `wait`
            log.error("a save in the background failed: %s", e)
            error = e
            if isinstance(e, StoreError):
                error = CheckpointError(f"a save in the background failed: {e}")
                error.__cause__ = e
        self._end(error, directory)

    def __repr__(self) -> str:
        return f"<PendingSave {self._state_text}>"


_last: tuple[PendingSave, Replicas] | None = None


def start(replicas: Replicas, work: Callable[[], str | None]) -> PendingSave:
    """Runs `work` in the background. The previous save must have ended."""
    global _last
    handle = PendingSave()
    handle._thread = threading.Thread(target=handle._run, args=(work,), name="outlast-states")
    handle._thread.start()
    _last = handle, replicas
    return handle


def completed(directory: str | None) -> PendingSave:
    """The handle of a save that was performed synchronously."""
    handle = PendingSave()
    handle._run(lambda: directory)
    return handle


def drain(*, quiet: bool = False) -> None:
    """Waits for the pending save; a `CheckpointError` if it failed, and `wait` was not called on
    its handle. `quiet` leaves this to the next save. If its replicas no longer exist, because of a
    restart in place, it is given a limited time, and its outcome is only in the log.
    """
    global _last
    if _last is None:
        return
    handle, replicas = _last
    stale = not replicas.current
    if stale and not handle._await_end(STALE_S):
        replicas.give_up()
    handle._join()
    if quiet and not stale:
        return
    _last = None
    if not stale and not handle._seen:
        handle.wait()

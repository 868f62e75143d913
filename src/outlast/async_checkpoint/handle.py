"""The handle of a save, as returned by `Checkpointer.save`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from outlast.errors import TimeoutError
from outlast.system.arguments import Duration, as_wait

__all__ = ["Handle", "SaveHandle"]


class Handle:
    """An operation in the background that ends once. Any thread may use it."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._seen = False

    @property
    def done(self) -> bool:
        """Whether it has ended: committed on all ranks, or failed on all."""
        return self._ended.is_set()

    @property
    def exception(self) -> Exception | None:
        """The error, if it failed; `None` while it is in progress and if it succeeded. An error
        that was read here is not raised again by the next save.
        """
        self._seen = self._seen or self.done
        return self._error

    @property
    def unseen_error(self) -> Exception | None:
        """Why it failed, if no caller has read or raised the error."""
        return None if self._seen or not self.done else self._error

    def _outcome(self, timeout: Duration | None, what: str) -> None:
        """Waits, and raises as `wait` does. `what` begins the message of a timeout."""
        limit = as_wait("timeout", timeout)
        if not self._ended.wait(None if limit is None else limit.total_seconds()):
            raise TimeoutError(f"{what} not committed after {limit}")
        self._seen = True
        if self._error is not None:
            raise self._error

    def _await_end(self, timeout_s: float | None) -> bool:
        """Waits for the end; returns whether it came in time. Raises no error of the operation."""
        return self._ended.wait(timeout_s)

    def _end(self, error: Exception | None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    @property
    def _state(self) -> str:
        return "in progress" if not self.done else "failed" if self._error else "committed"


class SaveHandle(Handle):
    """A save in progress. Any thread may use it.

    Attributes:
        step: the training step.
    """

    def __init__(self, step: int, seal: Callable[[], None]) -> None:
        super().__init__()
        self.step = step
        self._seal = seal

    def wait(self, timeout: Duration | None = None) -> None:
        """Waits until the checkpoint is committed: durable, on all ranks.

        Call it on the training thread, or while that thread is not training: it seals an overlapped
        snapshot that no optimizer step has sealed yet.

        Raises:
            TimeoutError: if it takes longer than `timeout`.
            CheckpointError: if the save failed; names rank, host and cause.
        """
        self._seal()
        self._outcome(timeout, f"the checkpoint of step {self.step} is")

    def __repr__(self) -> str:
        return f"<SaveHandle step={self.step} {self._state}>"

"""What `Checkpointer.save` returns: a save that is under way."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable

from outlast.errors import TimeoutError

__all__ = ["Handle", "SaveHandle"]


class Handle:
    """Something that is saved in the background, and ends once. Any thread may use it."""

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
        """Why it failed; `None` while it is under way, and if it did not. An error that was looked
        at is not raised again by the next save.
        """
        self._seen = self._seen or self.done
        return self._error

    @property
    def unseen_error(self) -> Exception | None:
        """Why it failed, if nobody has looked."""
        return None if self._seen or not self.done else self._error

    def _outcome(self, timeout: datetime.timedelta | None, what: str) -> None:
        """Waits, and raises what `wait` does. `what` is not committed when the time is over."""
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError(f"{what} not committed after {timeout}")
        self._seen = True
        if self._error is not None:
            raise self._error

    def _await_end(self, timeout_s: float | None) -> bool:
        """Whether it ends in that time. Takes no notice of errors."""
        return self._ended.wait(timeout_s)

    def _end(self, error: Exception | None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    @property
    def _state(self) -> str:
        return "under way" if not self.done else "failed" if self._error else "committed"


class SaveHandle(Handle):
    """A save that is under way. Any thread may use it.

    Attributes:
        step: what was saved.
    """

    def __init__(self, step: int, seal: Callable[[], None]) -> None:
        super().__init__()
        self.step = step
        self._seal = seal

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Waits until the checkpoint is committed: durable, on all ranks.

        To be called by the thread that trains, or when it is not training: an overlapped snapshot
        is sealed here, if no optimizer's step has done it.

        Raises:
            TimeoutError: when that takes longer than `timeout`.
            CheckpointError: when the save has failed; naming rank, host and cause.
        """
        self._seal()
        self._outcome(timeout, f"the checkpoint of step {self.step} is")

    def __repr__(self) -> str:
        return f"<SaveHandle step={self.step} {self._state}>"

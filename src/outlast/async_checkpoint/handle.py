"""What `Checkpointer.save` returns: a save that is under way."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable

from outlast.errors import TimeoutError

__all__ = ["SaveHandle"]


class SaveHandle:
    """A save that is under way. Any thread may use it.

    Attributes:
        step: what was saved.
    """

    def __init__(self, step: int, seal: Callable[[], None]) -> None:
        self.step = step
        self._seal = seal
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

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Waits until the checkpoint is committed: durable, on all ranks.

        To be called by the thread that trains, or when it is not training: an overlapped snapshot
        is sealed here, if no optimizer's step has done it.

        Raises:
            TimeoutError: when that takes longer than `timeout`.
            CheckpointError: when the save has failed; naming rank, host and cause.
        """
        self._seal()
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError(
                f"the checkpoint of step {self.step} is not committed after {timeout}"
            )
        self._seen = True
        if self._error is not None:
            raise self._error

    @property
    def unseen_error(self) -> Exception | None:
        """Why it failed, if nobody has looked."""
        return None if self._seen or not self.done else self._error

    def _await_end(self, timeout_s: float) -> bool:
        """Whether it ends in that time. Seals nothing, and takes no notice of errors."""
        return self._ended.wait(timeout_s)

    def _end(self, error: Exception | None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def __repr__(self) -> str:
        state = "under way" if not self.done else "failed" if self._error else "committed"
        return f"<SaveHandle step={self.step} {state}>"

"""The handle of a save, as returned by `Checkpointer.save`: a `concurrent.futures.Future`."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout  # another class before Python 3.11
from typing import TypeVar

from outlast.coordination.waits import waits
from outlast.system.arguments import Duration, as_wait

T = TypeVar("T")


class Handle(Future[T]):
    """An operation in the background that ends once. Any thread may use it.

    It is a `concurrent.futures.Future`, so `add_done_callback`, `concurrent.futures.wait` and
    `asyncio.wrap_future` work. It cannot be cancelled by itself: `cancel()` returns `False`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dropped = False
        self._seen = False
        self.set_running_or_notify_cancel()

    def cancelled(self) -> bool:
        """Whether it was dropped on all ranks: by an abort, a restart in place, or a `close` whose
        time ran out.
        """
        return self._dropped

    def result(self, timeout: Duration | None = None) -> T:
        """Waits for the end, and returns the result: for a save, its step, once the checkpoint is
        committed: durable, on all ranks.

        Raises:
            TimeoutError: the built-in one, if it takes longer than `timeout`.
            SaveCancelled: if it was dropped: a `CancelledError` and a `CheckpointError`.
            CheckpointError: if it failed; names rank, host and cause.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return super().result(0.0)

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """Waits for the end, and returns the error if it failed, else `None`. An error that was
        read here is not raised again by the next save.

        Raises:
            TimeoutError, SaveCancelled: as `result`.
        """
        limit = as_wait("timeout", timeout)
        if not self._await_end(None if limit is None else limit.total_seconds()):
            raise builtins.TimeoutError(f"{self._what()} not committed after {limit}")
        self._seen = True
        error = self._failure()
        if error is not None and self._dropped:
            raise error
        return error

    @property
    def succeeded(self) -> bool:
        """Whether it has ended without an error. Does not count as reading the error."""
        return self.done() and self._failure() is None

    @property
    def unseen_error(self) -> Exception | None:
        """Why it failed, if no caller has read or raised the error."""
        return None if self._seen or not self.done() else self._failure()

    def _failure(self) -> Exception | None:
        error = super().exception(0.0)
        assert error is None or isinstance(error, Exception)
        return error

    def _await_end(self, timeout_s: float | None) -> bool:
        """Waits for the end; returns whether it came in time. Raises no error of the operation."""
        try:
            with waits():
                super().exception(timeout_s)
        except (builtins.TimeoutError, FutureTimeout):
            return False
        return True

    def _what(self) -> str:
        return "it is"

    def _end(self, error: Exception | None, result: T) -> None:
        """Ends it with the error, or with the result if there is no error; at most once."""
        if self.done():
            return
        self._dropped = isinstance(error, CancelledError)
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)

    @property
    def _state_text(self) -> str:
        if not self.done():
            return "in progress"
        return "dropped" if self._dropped else "failed" if self._failure() else "committed"


class SaveHandle(Handle[int]):
    """A save in progress. Any thread may use it.

    Call `result`, `exception` and `wait` on the training thread, or while that thread is not
    training: they seal an overlapped snapshot that no optimizer step has sealed yet.
    `concurrent.futures.wait` does not: in the training thread, use it for eager saves only.
    """

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self._seal: Callable[[], None] = _no_copy  # never of what holds this handle: a cycle

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """See `Handle.exception`."""
        as_wait("timeout", timeout)  # checked before the wait for the copy
        self._seal()
        return super().exception(timeout)

    def wait(self, timeout: Duration | None = None) -> None:
        """`result`, without its value."""
        self.result(timeout)

    def _end(self, error: Exception | None, result: int) -> None:
        super()._end(error, result)
        self._seal = _no_copy  # a handle that a program keeps must not keep the snapshot

    def _what(self) -> str:
        return f"the checkpoint of step {self.step} is"

    def __repr__(self) -> str:
        return f"<SaveHandle step={self.step} {self._state_text}>"


class LaterSave(SaveHandle):
    """A save that begins later: until `begun`, a wait for it is a `ValueError`."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self._save: SaveHandle | None = None

    def begun(self, save: SaveHandle) -> None:
        """The save has begun: this handle ends as `save` does."""
        self._save = save
        save.add_done_callback(lambda _: self._end(save._failure(), save.step))

    def result(self, timeout: Duration | None = None) -> int:
        return self._present.result(timeout)

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        return self._present.exception(timeout)

    @property
    def _present(self) -> SaveHandle:
        if self._save is None:
            raise ValueError(
                f"the save of step {self.step} begins when what it is a part of is over: the "
                "functions of job.after_steps(), or the end of the epoch. Wait for it after that"
            )
        return self._save


def _no_copy() -> None:
    """The seal of a save that has no snapshot yet, or has ended."""

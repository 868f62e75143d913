"""The protocol between a queue of calls and the runners that execute them.

There are two: `fork_runner.ForkRunner`, a process for each call, and
`worker_runner.WorkerRunner`, one process for all calls.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from outlast.system.error_text import describe, exit_text, traceback_text


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call ended in this rank's background process. `cause` is one line, or `None` if the
    call succeeded.
    """

    cause: str | None = None
    traceback: str = ""

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps([self.cause, self.traceback]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Outcome:
        """The inverse of `encode`; raises `ValueError` for other data."""
        cause, traceback = json.loads(data)
        return cls(cause, traceback)


class Runner(Protocol):
    """Runs calls in the background. One thread at a time may use it."""

    def start(
        self, index: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Starts call `index`, or queues it. The call sees the arguments as they are when this
        returns, even if they change later.

        Raises:
            TypeError: if the function cannot be sent to another process; names it.
            OSError: if the system cannot start another process.
        """

    def descriptors(self) -> list[int]:
        """The descriptors to wait on: one is readable when there is something to `collect`."""

    def collect(self) -> list[tuple[int, Outcome]]:
        """The calls that have ended since this was last called. Does not wait."""

    def kill(self) -> None:
        """Kills all running calls. Does not wait; their outcomes can be collected."""

    def close(self) -> None:
        """Kills and reaps all processes, and releases their resources."""


def await_copies() -> None:
    """Waits for pending copies from a GPU (`non_blocking=True`): a snapshot of their target must
    not contain half a tensor.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def run_here(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
    """Runs in the background process: calls the function and returns the outcome."""
    try:
        fn(*args, **kwargs)
    except SystemExit as e:
        # As for a program: `None` and 0 mean success, a number is a code, all else a message.
        if e.code is None or e.code == 0:
            return Outcome()
        return Outcome(f"it exited with code {e.code}", traceback_text(e))
    except BaseException as e:  # noqa: BLE001 - reported to the parent process
        return Outcome(describe(e), traceback_text(e))
    return Outcome()


def ended_badly(exit_code: int) -> Outcome:
    """The outcome of a call whose process ended without reporting one. That is never success:
    `os._exit(0)` in the middle of a save also ends with code 0.
    """
    if exit_code >= 0:
        return Outcome(f"its process ended with exit code {exit_code}, in the middle of the call")
    return Outcome(f"its process {exit_text(exit_code)}")

"""Runs all calls in one process, which is replaced if it dies.

A call waits here until the previous one has ended. So a worker that dies fails one call, and the
others go to the next worker. The pickle is written to an in-memory file whose descriptor is sent to
the worker: the parent does not wait for the worker to read it, and there is only one copy.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from outlast.async_checkpoint.calls import worker_main
from outlast.async_checkpoint.calls.request import name_of
from outlast.async_checkpoint.calls.runner_protocol import Outcome, await_copies, ended_badly
from outlast.system.background_process import BackgroundProcess, start_process
from outlast.system.error_text import describe, traceback_text
from outlast.system.waiting import readable


class WorkerRunner:
    """A `Runner` with one persistent process, started at the first call; calls run in sequence."""

    def __init__(self, nice: int = 10) -> None:
        self._nice = nice
        self._worker: BackgroundProcess | None = None
        self._waiting: deque[tuple[int, int]] = deque()  # index, descriptor of the pickle
        self._running: int | None = None
        self._hung_up = False  # the channel has closed; the worker is about to end

    @property
    def pid(self) -> int | None:
        """The process id of the worker; `None` while there is none."""
        return None if self._worker is None else self._worker.pid

    def start(
        self, index: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if worker_main.importing_main:
            raise RuntimeError(
                "this program is being imported by its own worker: what it does when it is run "
                'must stand under `if __name__ == "__main__":`'
            )
        await_copies()
        self._waiting.append((index, _pickled(fn, args, dict(kwargs))))
        try:
            self._next()
        except OSError:
            _, descriptor = self._waiting.pop()  # the last one: this call
            os.close(descriptor)
            raise

    def descriptors(self) -> list[int]:
        if self._worker is None:
            return []
        if self._hung_up:
            return [self._worker.pidfd]
        return [self._worker.pidfd, self._worker.channel.fileno()]

    def collect(self) -> list[tuple[int, Outcome]]:
        outcomes: list[tuple[int, Outcome]] = []
        while self._worker is not None:
            outcome = self._said(self._worker)
            if outcome is None:
                break
            if self._running is not None:
                outcomes.append((self._running, outcome))
                self._running = None
            self._start_next(outcomes)
        return outcomes

    def kill(self) -> None:
        while self._waiting:
            os.close(self._waiting.popleft()[1])
        if self._worker is not None:
            self._worker.kill()

    def close(self) -> None:
        self.kill()
        self._running, self._hung_up = None, False
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _said(self, worker: BackgroundProcess) -> Outcome | None:
        """The outcome that the worker reported, or that its end implies; `None` if none yet."""
        alive = worker.alive  # read first: a report sent before its end is received below
        if not self._hung_up and readable(worker.channel.fileno(), timeout=0):
            try:
                return Outcome.decode(worker.channel.receive()[0])
            except EOFError:
                # The worker is ending, or a call has closed its end of the channel, which ends all
                # reports. If it is ending already, the kill no longer changes its exit code.
                self._hung_up = True
                worker.kill()
        if alive:
            return None
        self._worker, self._hung_up = None, False
        return ended_badly(worker.close())

    def _start_next(self, outcomes: list[tuple[int, Outcome]]) -> None:
        """Hands over the next call; a call for which no worker can be started fails."""
        while self._waiting and self._running is None and not self._hung_up:
            try:
                self._next()
            except OSError as e:
                index, descriptor = self._waiting.popleft()
                os.close(descriptor)
                outcomes.append((index, Outcome(f"no worker: {describe(e)}", traceback_text(e))))

    def _next(self) -> None:
        if self._running is not None or self._hung_up or not self._waiting:
            return  # `collect` calls this again once the previous call or the worker has ended
        index, descriptor = self._waiting[0]
        worker, new = self._worker, self._worker is None
        if worker is None:
            worker = start_process(worker_main.__name__, arguments=[str(self._nice)])
            self._worker = worker
        try:
            if new:
                worker.channel.send(json.dumps(_surroundings()).encode())
            worker.channel.send(b"", [descriptor])
        except (BrokenPipeError, ConnectionResetError):
            # The worker has died. The call goes to the next one; but if this one was new, the call
            # fails, otherwise workers would be started forever.
            self._hung_up = True
            worker.kill()
            if not new:
                return
        os.close(descriptor)
        self._waiting.popleft()
        self._running = index


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A descriptor of an in-memory file that holds the call."""
    descriptor = os.memfd_create("outlast-call", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            pickle.dump((fn, args, kwargs), file, protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as e:
        os.close(descriptor)
        if isinstance(e, OSError) or not isinstance(e, Exception):
            raise
        # Pickle has no single error type for this: a lambda is an AttributeError, a lock a
        # TypeError, and a method of an object may raise anything.
        raise TypeError(
            f"{name_of(fn)} cannot be given to a persistent worker, for it, or an argument, cannot "
            f"be pickled: {describe(e)}"
        ) from e
    return descriptor


def _surroundings() -> dict[str, Any]:
    """What the worker needs to import the modules of this process."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return {
        "path": [str(entry) for entry in sys.path],
        "main_name": None if spec is None else spec.name,
        "main_file": getattr(main, "__file__", None) if spec is None else None,
    }

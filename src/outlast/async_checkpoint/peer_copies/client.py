"""The main process's side of its keeper: started when needed, replaced when lost.

A restart in place interrupts the main thread anywhere, and a message that is cut short ends the
channel, and with it the copies that the keeper holds. So messages are sent and received by threads
of their own, and the caller only waits for the answer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

from outlast.async_checkpoint.peer_copies.messages import (
    Arrange,
    Arranged,
    KeepOnly,
)
from outlast.async_checkpoint.writer.messages import (
    Goodbye,
    Message,
    Request,
    RequestFailed,
    decode,
    encode,
)
from outlast.errors import CheckpointError
from outlast.system.background_process import BackgroundProcess, start_process
from outlast.system.channel import pack
from outlast.system.error_text import describe, exit_text

A = TypeVar("A", bound=Message)

REQUEST_S = 20.0
"""How long the keeper may take to answer a request that waits for no other host."""


class KeeperLost(CheckpointError):
    """The keeper has failed, ended, or does not answer."""


class Pending(Generic[A]):
    """A request that is being carried out."""

    def __init__(self, client: KeeperClient) -> None:
        self._client = client
        self._done = threading.Event()
        self._answer: Message | KeeperLost | None = None

    @property
    def done(self) -> bool:
        """Whether there is an answer, or will be none."""
        return self._done.is_set()

    def result(self, timeout: float | None = REQUEST_S) -> A:
        """Waits for the answer.

        Raises:
            KeeperLost: if the keeper was lost, or has not answered in time and was killed.
            CheckpointError: if the request failed.
        """
        if not self._done.wait(timeout):
            self._client.kill()
            raise KeeperLost(f"the keeper of copies did not answer within {timeout:g} s")
        if isinstance(self._answer, KeeperLost):
            raise self._answer
        if isinstance(self._answer, RequestFailed):
            raise CheckpointError(self._answer.error)
        return cast(A, self._answer)

    def _end(self, answer: Message | KeeperLost) -> None:
        self._answer = answer
        self._done.set()


class KeeperClient:
    """Starts the keeper with `config`, and talks to it. Any thread may use it. The replacement of a
    lost keeper is arranged as that was.

    Attributes:
        kept: the save whose copies are complete on all ranks; empty if there is none.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.kept = ""
        self._config = {**config, "main": os.getpid()}
        self._process: BackgroundProcess | None = None
        self._reader: threading.Thread | None = None
        self._pending: dict[int, Pending[Any]] = {}
        self._arrangement: Arrange | None = None
        self._arranged: Pending[Arranged] | None = None
        self._requests = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The process id of the keeper, if it is running."""
        process = self._process
        return None if process is None else process.pid

    def arrange(self, request: Arrange) -> None:
        """Begins a new arrangement; does not wait for it."""
        self._arrangement = request
        self._arranged = self.begin(request)

    def port(self) -> int:
        """The port at which the keeper listens.

        Raises:
            CheckpointError: if it cannot.
        """
        assert self._arrangement is not None
        assert self._arranged is not None
        if self._process is None and self._arranged.done:
            self.arrange(self._arrangement)
        return self._arranged.result().port

    def begin(self, request: Request[A], descriptors: Sequence[int] = ()) -> Pending[A]:
        """Sends a request; starts the keeper first if there is none. The caller keeps the
        descriptors open until the answer.
        """
        pending: Pending[A] = Pending(self)
        threading.Thread(
            target=self._deliver,
            args=(request, tuple(descriptors), pending),
            name="outlast-keeper-request",
            daemon=True,
        ).start()
        return pending

    def request(self, request: Request[A], timeout: float | None = REQUEST_S) -> A:
        """Sends a request, and waits for its answer; see `Pending.result`."""
        return self.begin(request).result(timeout)

    def keep_only(self, save_id: str) -> None:
        """Releases all copies but those of this save; without one, all."""
        self.kept = save_id
        with contextlib.suppress(CheckpointError):  # a keeper that is lost holds nothing
            self.request(KeepOnly(save_ids=[save_id] if save_id else []))

    def kill(self) -> None:
        """Kills the keeper; the next request starts another."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self, timeout_s: float) -> None:
        """Ends the keeper, after `timeout_s` with a kill. Its copies are lost."""
        with self._lock:
            self._closed = True
            process, reader = self._process, self._reader
        if reader is None:
            return
        if process is not None:
            with contextlib.suppress(OSError):
                process.channel.send(encode(Goodbye(tidy=False)))
            if process.wait(timeout_s) is None:
                process.kill()
        reader.join()  # the end of the process ends the channel

    def _deliver(self, request: Message, descriptors: Sequence[int], pending: Pending[Any]) -> None:
        try:
            with self._lock:
                process, is_new = self._running()
                if is_new and self._arrangement is not None and not isinstance(request, Arrange):
                    self._arranged = Pending(self)
                    self._send(process, self._arrangement, (), self._arranged)
                self._send(process, request, descriptors, pending)
        except (OSError, KeeperLost) as e:
            pending._end(KeeperLost(f"the keeper of copies cannot be reached: {describe(e)}"))

    def _send(
        self,
        process: BackgroundProcess,
        request: Message,
        descriptors: Sequence[int],
        pending: Pending[Any],
    ) -> None:
        self._requests += 1
        self._pending[self._requests] = pending  # ended by the reader, even if the send fails
        process.channel.send(encode(request, self._requests), descriptors)

    def _running(self) -> tuple[BackgroundProcess, bool]:
        if self._closed:
            raise KeeperLost("the checkpointer was closed")
        is_new = self._process is None
        if self._process is None:
            process = start_process(
                "outlast.async_checkpoint.peer_copies.keeper",
                arguments=[pack(self._config).decode().rstrip("\n")],
            )
            self._process = process
            self._reader = threading.Thread(
                target=self._read, args=(process,), name="outlast-keeper", daemon=True
            )
            self._reader.start()
        return self._process, is_new

    def _read(self, process: BackgroundProcess) -> None:
        try:
            while True:
                answer, number = decode(process.channel.receive()[0])
                with self._lock:
                    pending = self._pending.pop(number, None)
                if pending is not None:
                    pending._end(answer)
        except (EOFError, OSError):
            pass
        # First: a request that comes now starts another keeper, instead of using a closed channel.
        with self._lock:
            if self._process is process:
                self._process = None
            lost = list(self._pending.values())
            self._pending.clear()
        how = exit_text(process.close(1.0))
        for pending in lost:
            pending._end(KeeperLost(f"the keeper of copies, process {process.pid}, {how}"))

"""The main process's side of its writer process: started when needed, replaced when lost.

`request` waits for an answer; `tell` sends a notification, from any thread. Both processes map the
snapshot buffers, so a replaced writer gets them again; what the lost one was writing has failed.

A restart in place interrupts the main thread anywhere. A message that was cut short breaks the
channel, and an answer that may have been read in part ends the writer: its replacement gets the
buffers again, and the messages that say which snapshots are in them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from outlast.async_checkpoint.observers import writer_program
from outlast.async_checkpoint.writer.messages import (
    AwaitRemovals,
    BeginSave,
    BufferReused,
    Commit,
    Goodbye,
    HideFolders,
    KeepMemory,
    Message,
    ReleaseBuffer,
    RemoveFolders,
    Request,
    RequestFailed,
    SaveDropped,
    SettleCommit,
    ShareBuffer,
    SnapshotSealed,
    SnapshotTorn,
    WriteSnapshot,
    decode,
    encode,
)
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.errors import CheckpointError, CheckpointTimeout
from outlast.system.background_process import BackgroundProcess, start_process
from outlast.system.channel import Channel, pack
from outlast.system.error_text import exit_text
from outlast.system.shared_memory import SharedMemory

log = logging.getLogger("outlast.checkpoint")

A = TypeVar("A", bound=Message)


class WriterFailed(CheckpointError):
    """A request to the writer failed, with this traceback in the writer, or the writer was lost."""

    def __init__(self, cause: str, remote_traceback: str = "") -> None:
        super().__init__(cause)
        self.remote_traceback = remote_traceback


class WriterLost(WriterFailed):
    """The writer ended before it answered a request."""


class WriterTimeout(WriterFailed, CheckpointTimeout):
    """The writer did not answer a request within the time limit, and was killed."""


_REQUESTS: dict[type[Message], str] = {
    WriteSnapshot: "write the files of this rank",
    Commit: "commit a checkpoint",
    SettleCommit: "find out whether a checkpoint is committed",
    RemoveFolders: "remove the files of a failed save",
    HideFolders: "remove old checkpoints",
    AwaitRemovals: "remove old checkpoints",
}
# How long a killed process may take to end. One that waits for a disk ends when the disk answers.
_KILL_S = 5.0
_EXIT_S = 1.0  # how long a writer whose connection has ended may take to exit
_LEAST_S = 0.001  # 0 would mean not to wait for messages at all


class WriterClient:
    """Starts the writer process with `config` (url, threads, linger_s, launcher); talks to it.

    Attributes:
        timeout_s: how long the writer may take to read a message, or to answer a request.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.timeout_s = 1800.0
        self._config = {**config, "main": os.getpid()}
        self._process: BackgroundProcess | None = None
        self._buffers: dict[int, tuple[SharedMemory, bytes]] = {}
        self._starting = threading.Lock()
        self._kept: tuple[SharedMemory, str] | None = None
        self._closed = False
        # How the copy into each buffer ended, for the replacement of a lost writer.
        self._ends: dict[int, SnapshotSealed | SnapshotTorn] = {}
        self._half_read = False
        self._requests = 0
        self._requesting = threading.RLock()
        self._telling = threading.Lock()
        self._deaf: BackgroundProcess | None = None  # did not read a notification in time
        self._busy: BackgroundProcess | None = None  # did not answer before a restart went on

    @property
    def pid(self) -> int | None:
        """The process id of the writer, if it is running."""
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        """Starts the writer process, unless it is running.

        Raises:
            WriterFailed: after `close`: a save that was dropped by it must not start another one.
        """
        with self._starting:
            if self._closed:
                raise WriterFailed("the checkpointer was closed")
            if self._process is not None:
                usable = self._process is not self._deaf and self._process.alive
                if usable and not _hung_up(self._process.channel):
                    return
                _end(self._process)
                self._process = None
            process = start_process(
                writer_program(),
                arguments=[pack(self._config).decode().rstrip("\n")],
            )
            process.channel.limit(max(self.timeout_s, _LEAST_S))
            try:
                for number, (memory, index) in self._buffers.items():
                    if memory.intact:
                        _share(process, number, memory, index)
                if self._kept is not None and self._kept[0].intact:
                    _keep(process, *self._kept)
                # A notification sent meanwhile follows these, to the new process.
                with self._telling:
                    for message in self._ends.values():
                        process.channel.send(encode(message))
                    self._process = process
            except TimeoutError:
                _end(process)
                raise WriterTimeout(
                    f"the writer process {process.pid} was not ready for {self._config['url']} "
                    f"within {self.timeout_s:g} s, and was killed"
                ) from None

    def share(self, number: int, memory: SharedMemory, index: bytes) -> None:
        """Shares a buffer with the writer, replacing the one with that number. `index` says what a
        snapshot in it holds, and where (`Structure.index`).
        """
        with self._starting:
            self._buffers[number] = (memory, index)
            with self._telling:
                self._ends.pop(number, None)
            if self._process is not None:
                with self._killed_if_late(self._process):  # its replacement gets the buffer
                    _share(self._process, number, memory, index)

    def forget(self, number: int) -> None:
        """Stops sharing this buffer with replacements of the writer."""
        with self._starting:
            self._buffers.pop(number, None)

    def keep(self, memory: SharedMemory, socket: str) -> None:
        """Makes the writer keep `memory`, instead of what it kept before: after a kill of this
        process, its replacement gets it at `socket`. Starts the writer. Memory that was lost is not
        kept.
        """
        if not memory.intact:
            return
        with self._starting:
            self._kept = (memory, socket)
            process = self._process
            if process is not None:
                with self._killed_if_late(process):  # its replacement gets the memory
                    _keep(process, memory, socket)
        if process is None:
            self.start()

    def tell(self, message: Message) -> None:
        """Sends a notification. A lost writer does not need it."""
        with self._telling:  # either this writer gets it, or its replacement
            match message:
                case SnapshotSealed() | SnapshotTorn():
                    self._ends[message.buffer] = message
                case BufferReused() | ReleaseBuffer():
                    self._ends.pop(message.buffer, None)
            process = self._process
        if process is not None:
            with self._killed_if_late(process):
                process.channel.send(encode(message))

    def await_idle(self, timeout: float) -> None:
        """Waits for the request in progress, for `timeout` seconds. A writer that does not answer
        in time, because its disk does not respond, is killed and will be replaced: the buffers are
        mapped here too.
        """
        if self._requesting.acquire(timeout=timeout):
            self._requesting.release()
            return
        process = self._process
        if process is not None:
            self._busy = process  # before the kill, as `_deaf`
            process.kill()  # the end of the channel ends the wait for its answer

    @property
    def exclusive(self) -> AbstractContextManager[Any]:
        """Holds back requests of other threads during several of this thread."""
        return self._requesting

    def request(self, request: Request[A]) -> A:
        """Sends a request, and waits for the answer.

        Raises:
            WriterTimeout: if there is no answer within `timeout_s`; the writer is then killed.
            WriterFailed: names the cause.
            Dropped: if the request was dropped.
        """
        with self._requesting:
            answer = self._exchange(request)
        if isinstance(answer, SaveDropped):
            raise Dropped
        if isinstance(answer, RequestFailed):
            if answer.external:  # its text says enough
                log.debug("%s", answer.traceback)
                raise WriterFailed(answer.error)
            raise WriterFailed(answer.error, answer.traceback)
        return cast(A, answer)

    def _exchange(self, request: Message) -> Message:
        if self._half_read:
            with self._starting:
                if self._process is not None:
                    _end(self._process)
                    self._process = None
            self._half_read = False
        self.start()
        process = self._process
        assert process is not None
        process.channel.limit(max(self.timeout_s, _LEAST_S))
        self._requests += 1
        number = self._requests
        try:
            process.channel.send(encode(request, number))
            self._half_read = True
            while True:
                answer, answered = decode(process.channel.receive()[0])
                if answered == number:
                    break
            self._half_read = False
        except TimeoutError:
            self._half_read = False
            raise self._too_late(process, request) from None
        except (OSError, EOFError):
            self._half_read = False
            if self._deaf is process:  # killed meanwhile by `tell`, on another thread
                raise self._too_late(process, request) from None
            raise WriterLost(self._how_lost(process)) from None
        return answer

    def begin_save(self) -> None:
        """Sends `BeginSave`, and sends it again to another writer if this one ends before it
        answers.

        A writer that was killed between two saves looks alive to `start` until the kernel has ended
        it, milliseconds later, and then only this request fails. A second attempt is safe:
        `BeginSave` comes before everything that a save writes, and no rank has reported a result.
        The new writer has the buffers, and knows how each copy ended (`start`). A copy in progress
        tells it the offset that it reaches next, which covers those that the lost writer was told.

        It is the only request that is sent again: a writer that was lost later may have written
        files or committed. It is sent again once: if the second writer is lost too, whatever ends
        it would end the third. A writer that does not answer in time is not tried again either: the
        disk does not respond.
        """
        try:
            self.request(BeginSave())
        except WriterLost as lost:
            if self._closed:
                raise
            log.warning("%s before a save began: another one is started", lost)
            self.request(BeginSave())

    def close(self, timeout: float, *, tidy: bool = False, last: bool = False) -> None:
        """Ends the writer process, after `timeout` seconds with a kill; what it is writing and its
        snapshots are lost. With `tidy` it deletes the recycled files first; with `last`, also the
        files of saves that were not committed.
        """
        with self._starting:  # a request that loses this writer starts no other one
            self.tell(Goodbye(tidy=tidy, last=last))
            self._closed = True
            if self._process is not None:
                _end(self._process, timeout)
                self._process = None

    @contextlib.contextmanager
    def _killed_if_late(self, process: BackgroundProcess) -> Iterator[None]:
        """For a message without an answer. A lost writer does not need it; one that does not read
        it in time is killed, because the channel holds a part of the message. The next request
        starts another one.
        """
        try:
            yield
        except TimeoutError:
            self._deaf = process  # before the kill: it takes a moment, and ends a wait for answers
            process.kill()
        except OSError:
            pass

    def _how_lost(self, process: BackgroundProcess) -> str:
        # `close`, on another thread, may have ended the connection, and gives the writer time to
        # tidy up. It holds the lock until the writer has ended: so this does not kill it meanwhile.
        with self._starting:
            how = _end(process, _EXIT_S)
            if self._process is process:
                self._process = None
        if self._busy is process:
            how = "was still at work when a restart took its buffers back, and was killed for that"
        return f"the writer process {process.pid} {how}"

    def _too_late(self, process: BackgroundProcess, request: Message) -> WriterTimeout:
        _end(process)
        with self._starting:
            if self._process is process:
                self._process = None
        what = _REQUESTS.get(type(request), "answer")
        return WriterTimeout(
            f"the writer process {process.pid} could not {what} in {self._config['url']} within "
            f"{self.timeout_s:g} s (the disk may not respond), and was killed"
        )


def _share(process: BackgroundProcess, number: int, memory: SharedMemory, index: bytes) -> None:
    message = ShareBuffer(buffer=number, size_bytes=memory.size_bytes, blob=index)
    process.channel.send(encode(message), [memory.descriptor])


def _keep(process: BackgroundProcess, memory: SharedMemory, socket: str) -> None:
    message = KeepMemory(size_bytes=memory.size_bytes, socket=socket)
    process.channel.send(encode(message), [memory.descriptor])


def _end(process: BackgroundProcess, timeout_s: float = 0.0) -> str:
    """Ends the process, with a kill after `timeout_s`, and reaps it; returns how it ended. If it
    waits for its disk, it cannot be killed yet: a thread waits for it.
    """
    process.channel.close()
    if process.wait(timeout_s) is None:
        process.kill()
        if process.wait(_KILL_S) is None:
            threading.Thread(target=process.close, name="outlast-reap", daemon=True).start()
            return "cannot be killed: it waits for its disk"
        process.close()
        return f"did not end within {timeout_s:g} s of the end of its connection, and was killed"
    return exit_text(process.close())


def _hung_up(channel: Channel) -> bool:
    """Whether either end has ended the connection."""
    if channel.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(channel.fileno(), 0)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

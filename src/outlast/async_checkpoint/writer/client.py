"""The main process's side of its writer process: started when needed, started again when lost.

One thread of the checkpointer makes all requests that are answered (`request`); any thread may
`tell` what needs no answer. The memories are held on both sides, so a new writer gets them again;
what a lost one was writing has failed.

The main thread of a training that is restarted in place is interrupted anywhere. A message that
was cut short ends the channel, and an answer of which half may have been read ends the writer:
the next one gets the memories, and is told what lies in them.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from contextlib import AbstractContextManager
from typing import Any

from outlast.async_checkpoint.snapshot.shared_memory import SharedMemory
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.errors import CheckpointError
from outlast.system.background_process import BackgroundProcess, start_process
from outlast.system.channel import Channel, pack, unpack
from outlast.system.exit_text import exit_text

__all__ = ["WriterClient", "WriterFailed"]


class WriterFailed(CheckpointError):
    """The writer could not do what it was asked, or was lost. `remote_traceback` is its own."""

    def __init__(self, cause: str, remote_traceback: str = "") -> None:
        super().__init__(cause)
        self.remote_traceback = remote_traceback


class WriterClient:
    """Starts the writer process, and talks to it.

    Args:
        config: what `writer_main` reads: url, threads, linger_s, launcher.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = {**config, "main": os.getpid()}
        self._process: BackgroundProcess | None = None
        self.memories: dict[int, tuple[SharedMemory, bytes]] = {}
        self._starting = threading.Lock()
        self._closed = False
        # How the snapshot in each memory has ended, for a writer that takes the place of another.
        self._ends: dict[int, tuple[dict[str, Any], bytes]] = {}
        self._half_read = False
        self._requests = 0
        self._asking = threading.RLock()
        self._telling = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the writer process, if there is one."""
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        """Starts the writer process, unless it is there.

        Raises:
            WriterFailed: after `close`: a save that was dropped then must not start another one.
        """
        with self._starting:
            if self._closed:
                raise WriterFailed("the checkpointer was closed")
            if self._process is not None:
                if self._process.alive and not _hung_up(self._process.channel):
                    return
                self._process.close()
                self._process = None
            process = start_process(
                "outlast.async_checkpoint.writer.main",
                arguments=[pack(self._config).decode().rstrip("\n")],
            )
            for number, (memory, index) in self.memories.items():
                self._hand(process, number, memory, index)
            # What is told meanwhile comes after it, to the new process.
            with self._telling:
                for header, blob in self._ends.values():
                    process.channel.send(pack(header, blob))
                self._process = process

    def give(self, number: int, memory: SharedMemory, index: bytes) -> None:
        """Gives the writer a shared memory, instead of the one of that number.

        Args:
            number: names it.
            memory: the memory.
            index: what lies in it and where (`Structure.index`).
        """
        with self._starting:
            self.memories[number] = (memory, index)
            with self._telling:
                self._ends.pop(number, None)
            if self._process is not None:
                with contextlib.suppress(OSError):  # lost: the next one gets it
                    self._hand(self._process, number, memory, index)

    def forget(self, number: int) -> None:
        """A writer that is started anew does not get this memory."""
        with self._starting:
            self.memories.pop(number, None)

    def tell(self, header: dict[str, Any], blob: bytes = b"") -> None:
        """Says something that is not answered. A writer that is lost needs not to know."""
        with self._telling:  # either this process is told, or the one that takes its place
            if header["op"] in ("sealed", "torn"):
                self._ends[header["buffer"]] = (header, blob)
            elif header["op"] in ("reuse", "release"):
                self._ends.pop(header["buffer"], None)
            process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                process.channel.send(pack(header, blob))

    def free(self, timeout: float) -> None:
        """Has what was asked for end. A writer that does not come back, because its disk does not,
        is ended, and the next one takes its place: the memories are here too.

        Args:
            timeout: in seconds.
        """
        if self._asking.acquire(timeout=timeout):
            self._asking.release()
            return
        process = self._process
        if process is not None:
            process.kill()  # whoever waits for its answer is told by the end of the channel

    @property
    def one_at_a_time(self) -> AbstractContextManager[Any]:
        """Keeps the requests of other threads out between several of this one."""
        return self._asking

    def request(self, header: dict[str, Any], blob: bytes = b"") -> dict[str, Any]:
        """Asks for something, and waits for the answer.

        Raises:
            WriterFailed: naming the cause.
            Dropped: if it was told to drop it.
        """
        with self._asking:
            return self._request(header, blob)

    def _request(self, header: dict[str, Any], blob: bytes) -> dict[str, Any]:
        if self._half_read:
            self._give_up()
        self.start()
        process = self._process
        assert process is not None
        self._requests += 1
        number = self._requests
        try:
            process.channel.send(pack({**header, "id": number}, blob))
            self._half_read = True
            while True:
                answer, _ = unpack(process.channel.receive()[0])
                if answer["id"] == number:
                    break
            self._half_read = False
        except (OSError, EOFError):
            self._half_read = False
            raise WriterFailed(self._how_lost(process)) from None
        if answer.get("dropped"):
            raise Dropped
        if "error" in answer:
            raise WriterFailed(answer["error"], answer["traceback"])
        return answer

    def close(self, timeout: float) -> None:
        """Ends the writer process; what it is writing is lost. Its snapshots go with it.

        Args:
            timeout: in seconds, until it is killed.
        """
        self.tell({"op": "bye"})
        with self._starting:
            self._closed = True
            if self._process is not None:
                self._process.close(timeout)
                self._process = None

    def _hand(
        self, process: BackgroundProcess, number: int, memory: SharedMemory, index: bytes
    ) -> None:
        header = {"op": "buffer", "buffer": number, "size_bytes": memory.size_bytes}
        process.channel.send(pack(header, index), [memory.descriptor])

    def _give_up(self) -> None:
        with self._starting:
            if self._process is not None:
                self._process.close()
                self._process = None
        self._half_read = False

    def _how_lost(self, process: BackgroundProcess) -> str:
        code = process.close(timeout=1.0)
        with self._starting:
            if self._process is process:
                self._process = None
        return f"the writer process {process.pid} {exit_text(code)}"


def _hung_up(channel: Channel) -> bool:
    """Whether either end has ended the connection."""
    if channel.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(channel.fileno(), 0)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

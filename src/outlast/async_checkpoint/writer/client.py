"""The main process's side of a process beside it: started when needed, replaced when lost.

`begin` and `request` call a method and get its result; `tell` calls one that has no answer. Any
thread may use them: the caller sends, and a thread receives the answers.

A restart in place interrupts the main thread anywhere. A message that was cut short ends the
connection, and with it the process. Its replacement is told again what it must know (`_replayed`);
what the lost one was doing has failed.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # another class before Python 3.11
from typing import Any, Concatenate, ParamSpec, TypeVar

from outlast.async_checkpoint.observers import writer_program
from outlast.async_checkpoint.storage.fence import Credentials
from outlast.async_checkpoint.writer.main import Writer
from outlast.async_checkpoint.writer.remote import Call
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.errors import CheckpointError, CheckpointTimeout
from outlast.system.background_process import BackgroundProcess, start_process
from outlast.system.channel import pack, unpack
from outlast.system.error_text import exit_text
from outlast.system.parallel import start_thread
from outlast.system.processes import readable
from outlast.system.shared_memory import SharedMemory

log = logging.getLogger("outlast.checkpoint")

P = ParamSpec("P")
R = TypeVar("R")

_EXIT_S = 1.0  # how long a process whose connection has ended may take to exit
_KILL_S = 5.0  # how long a killed one may take: if it waits for a disk, until the disk answers
_LEAST_S = 0.001  # 0 would mean not to wait at all


class ProcessFailed(CheckpointError):
    """A request failed, with this traceback in the other process, or that was lost."""

    def __init__(self, cause: str, remote_traceback: str = "") -> None:
        super().__init__(cause)
        self.remote_traceback = remote_traceback


class ProcessLost(ProcessFailed):
    """The process ended before it answered a request."""


class ProcessTimeout(ProcessFailed, CheckpointTimeout):
    """The process did not answer a request within the time limit, and was killed."""


class Pending(Future[R]):
    """A request that is being carried out."""

    def __init__(self, client: ProcessClient, method: str) -> None:
        super().__init__()
        self.method = method
        self.process: BackgroundProcess | None = None
        self._client = client

    def result(self, timeout: float | None = None) -> R:
        """Waits for the answer; a `ProcessTimeout` if there is none within `timeout`, when the
        process is killed; a `ProcessFailed` names another cause. `Dropped` if the request was.
        """
        try:
            return super().result(timeout)
        except (builtins.TimeoutError, FutureTimeout):
            if self.done():  # with such an error
                raise
        assert timeout is not None
        self._client.kill_late(self.process or self._client._process)
        raise self._client.too_late(self, timeout)

    def answered(self, answer: dict[str, Any]) -> None:
        if "dropped" in answer:
            self.set_exception(Dropped())
        elif "error" in answer:
            traceback = answer["traceback"]
            if answer["outside"]:  # its text says enough
                log.debug("%s", traceback)
                traceback = ""
            self.set_exception(ProcessFailed(answer["error"], traceback))
        else:
            self.set_result(answer["value"])


class ProcessClient:
    """Starts a process with `config` (linger_s, launcher, and what else it needs); talks to it.

    Attributes:
        name: of the process, in messages.
        requests: what each request does, in messages.
        timeout_s: how long the process may take to read a message, or to answer a request.
        exclusive: held during a `request`; holds back those of other threads.
    """

    name = "process"
    requests: dict[str, str] = {}  # noqa: RUF012 - read, and never written

    def __init__(self, config: dict[str, Any]) -> None:
        self.timeout_s = 1800.0
        self._config = {**config, "main": os.getpid()}
        self._process: BackgroundProcess | None = None
        self._readers: list[threading.Thread] = []  # of this process, and of those it replaced
        self._over = threading.Event()  # the reader of this process has ended
        self._pending: dict[int, Pending[Any]] = {}
        self._count = 0
        self._closed = False
        self.exclusive = threading.RLock()
        self._sending = threading.RLock()
        self._late: BackgroundProcess | None = None  # did not read or answer a message in time
        self._busy: BackgroundProcess | None = None  # did not answer before a restart went on
        self._replaced = False  # whether the process is not the first one

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        with self._sending:
            self._running()

    def begin(
        self, method: Callable[Concatenate[Any, P], R], *_: P.args, **arguments: P.kwargs
    ) -> Pending[R]:
        """Calls a method of the process, by keyword arguments; starts the process if needed. The
        caller keeps an argument `memory` open until the answer.
        """
        pending: Pending[R] = Pending(self, method.__name__)
        self._send_request(pending, arguments)
        return pending

    def request(
        self, method: Callable[Concatenate[Any, P], R], *_: P.args, **arguments: P.kwargs
    ) -> R:
        """`begin`, and its result within `timeout_s`; see `Pending.result`."""
        with self.exclusive:
            return self.begin(method, *_, **arguments).result(self.timeout_s)

    def tell(
        self, method: Callable[Concatenate[Any, P], None], *_: P.args, **arguments: P.kwargs
    ) -> None:
        """Calls a method that has no answer. A lost process does not need it."""
        call = Call(method.__name__, arguments)
        with self._sending:  # either this process gets it, or its replacement
            self._remember(call)
            if self._process is not None:
                self._send(self._process, call)

    def await_idle(self, timeout_s: float) -> None:
        """Waits for the requests in progress, for `timeout_s`. A process that does not answer,
        because its disk does not, is killed and replaced: the buffers are mapped here too.
        """
        pending = list(self._pending.values())
        futures.wait(pending, timeout_s)
        for process in {each.process for each in pending if not each.done()}:
            if process is not None:
                self._busy = process  # before the kill: it takes a moment
                process.kill()

    def kill_late(self, process: BackgroundProcess | None) -> None:
        """Kills a process that was late, whose channel may hold a part of a message."""
        self._late = process  # before the kill: it takes a moment, and ends waits for answers
        if process is not None:
            process.kill()

    def too_late(self, pending: Pending[Any], timeout_s: float) -> ProcessTimeout:
        """The error of a request to a process that was killed by `kill_late`."""
        what, process = self.requests.get(pending.method, "answer"), pending.process
        where, why = "", ""
        if "url" in self._config:
            where, why = f" in {self._config['url']}", " (the disk may not respond)"
        return ProcessTimeout(
            f"the {self.name}{f' {process.pid}' if process else ''} could not {what}{where} within "
            f"{timeout_s:g} s{why}, and was killed"
        )

    def end(self, timeout_s: float) -> None:
        """Waits for the end of the process, which has been told to end; kills it after `timeout_s`.
        May be repeated, if an interrupt has cut it short.

        Waits for those that it has replaced too: a process whose connection a restart has ended
        takes the main process for killed, and lingers until its reader has killed it. A program
        that ended before the reader did that would leave it behind.
        """
        process = self._process
        if process is not None and not self._over.wait(timeout_s):
            process.kill()
        for reader in self._readers:
            reader.join(_KILL_S)

    # -------------------------------------------------------------------------- for subclasses

    def _program(self) -> str:
        raise NotImplementedError

    def _remember(self, call: Call) -> None:
        """Notes what a replacement must be told again. The lock is held."""

    def _replayed(self, method: str) -> Iterator[tuple[Call, Pending[Any] | None]]:
        """The calls that a new process gets first, before that of this method. The lock is held."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------ private

    def _send_request(self, pending: Pending[Any], arguments: dict[str, Any]) -> None:
        with self._sending:
            process = self._running(pending.method)
            process.channel.limit(max(self.timeout_s, _LEAST_S))
            self._send(process, self._numbered(Call(pending.method, arguments), process, pending))

    def _numbered(self, call: Call, process: BackgroundProcess, pending: Pending[Any]) -> Call:
        self._count += 1
        pending.process = process
        self._pending[self._count] = pending  # ended by the reader, even if the send fails
        return Call(call.method, call.arguments, self._count)

    def _send(self, process: BackgroundProcess, call: Call) -> None:
        try:
            call.send(process.channel)
        except TimeoutError:
            self.kill_late(process)
        except OSError:
            pass  # lost: the reader ends what is pending

    def _running(self, method: str = "") -> BackgroundProcess:
        if self._closed:
            raise ProcessFailed("the checkpointer was closed")
        process = self._process
        if process is not None:
            if process is not self._late and process.alive and not process.channel.hung_up:
                return process
            process.kill()
            self._process = None
        process = start_process(
            self._program(), arguments=[pack(self._config).decode().rstrip("\n")]
        )
        try:
            process.channel.limit(max(self.timeout_s, _LEAST_S))
            self._over = over = threading.Event()
            name = f"outlast-{self.name.partition(' ')[0]}"
            reader = start_thread(name, self._read, process, over)
            self._replaced = bool(self._readers)
            self._readers = [*(each for each in self._readers if each.is_alive()), reader]
            for call, pending in self._replayed(method):
                numbered = call if pending is None else self._numbered(call, process, pending)
                self._send(process, numbered)
        except BaseException:  # an interrupt: another process will be started
            process.kill()
            raise
        if process is self._late:
            raise ProcessTimeout(
                f"the {self.name} {process.pid} was not ready for {self._config.get('url')} within "
                f"{self.timeout_s:g} s, and was killed"
            )
        self._process = process
        return process

    def _read(self, process: BackgroundProcess, over: threading.Event) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                readable(process.channel.fileno())  # without the limit that a message has
                answer, _ = unpack(process.channel.receive()[0])
                pending = self._pending.pop(answer["number"], None)
                if pending is not None:
                    pending.answered(answer)
        with self._sending:  # a request that comes now starts another process
            if self._process is process:
                self._process = None
            lost = {n: each for n, each in self._pending.items() if each.process is process}
            for number in lost:
                del self._pending[number]
        how = ""
        if process.wait(_EXIT_S) is None:
            how = f"did not end within {_EXIT_S:g} s of the end of its connection, and was killed"
        code = process.close()
        if process is self._busy:
            how = "was still at work when a restart took its buffers back, and was killed for that"
        for pending in lost.values():
            if process is self._late:
                pending.set_exception(self.too_late(pending, self.timeout_s))
            else:
                text = f"the {self.name} {process.pid} {how or exit_text(code)}"
                pending.set_exception(ProcessLost(text))
        over.set()


class WriterClient(ProcessClient):
    """Starts the writer process with `config` (url, threads, linger_s, launcher); talks to it. Both
    processes map the snapshot buffers, so a replaced writer gets them again.
    """

    name = "writer process"
    requests = {  # noqa: RUF012 - read, and never written
        "write_snapshot": "write the files of this rank",
        "commit": "commit a checkpoint",
        "settle_commit": "find out whether a checkpoint is committed",
        "remove_folders": "remove the files of a failed save",
        "hide_folders": "remove old checkpoints",
        "await_removals": "remove old checkpoints",
    }

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._buffers: dict[int, Call] = {}
        self._ends: dict[int, Call] = {}  # how the copy into each buffer ended
        self._kept: dict[str, Call] = {}

    def keep(self, memory: SharedMemory, socket: str, name: str) -> None:
        """Makes the writer keep `memory`, instead of what had this name: after a kill of this
        process, its replacement gets it at `socket`. Starts the writer. Lost memory is not kept.
        """
        if memory.intact:
            self.start()
            self.tell(Writer.keep_memory, memory=memory, socket=socket, name=name)

    def begin_save(self) -> None:
        """Calls `begin_save`, and once more, of another writer, if this one ends without an answer.

        A writer that was killed between two saves looks alive to `start` until the kernel has ended
        it, milliseconds later, and then only this request fails. A second attempt is safe: it comes
        before everything that a save writes, and no rank has reported a result. The new writer has
        the buffers, and knows how each copy ended. A copy in progress tells it the offset that it
        reaches next, which covers those that the lost writer was told.

        It is the only request that is sent again: a writer that was lost later may have written
        files or committed. It is sent again once: if the second writer is lost too, whatever ends
        it would end the third. Nor is it sent again after a timeout: the disk does not respond.
        """
        try:
            self.request(Writer.begin_save)
        except ProcessLost as lost:
            if self._closed:
                raise
            log.warning("%s before a save began: another one is started", lost)
            self.request(Writer.begin_save)

    def close(
        self,
        timeout_s: float,
        credentials: Credentials = Credentials(),  # noqa: B008 - it is frozen
        *,
        tidy: bool = False,
        last: bool = False,
    ) -> None:
        """Ends the writer process as `Writer.leave` says, after `timeout_s` with a kill.

        If a restart has cut a message short, the writer is lost, and another one is started to do
        that; but not if the disk did not respond.
        """
        with self._sending:  # a request that loses this writer starts no other one
            if (tidy or last) and timeout_s > 0 and self._readers and self._late is None:
                # Without another writer, the next job removes what the lost one has left.
                with contextlib.suppress(OSError, ProcessFailed):
                    self._running()
            allowed, replaced = dataclasses.asdict(credentials), self._replaced
            self.tell(Writer.leave, tidy=tidy, last=last, replaced=replaced, **allowed)
            self._closed = True
        self.end(timeout_s)

    def _program(self) -> str:
        return writer_program()

    def _remember(self, call: Call) -> None:
        buffer = call.arguments.get("buffer", -1)
        if call.method in ("share_buffer", "release_buffer", "reuse_buffer"):
            self._ends.pop(buffer, None)
        match call.method:
            case "share_buffer":
                self._buffers[buffer] = call
            case "release_buffer":
                self._buffers.pop(buffer, None)
            case "sealed" | "torn":
                self._ends[buffer] = call
            case "keep_memory":
                self._kept[call.arguments["name"]] = call

    def _replayed(self, method: str) -> Iterator[tuple[Call, Pending[Any] | None]]:
        for call in (*self._buffers.values(), *list(self._kept.values())):
            if call.arguments["memory"].intact:
                yield call, None
        for call in self._ends.values():
            yield call, None

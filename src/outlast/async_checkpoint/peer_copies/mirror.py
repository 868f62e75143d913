"""A mirror of a rank's small shared memory, in the memory of a rank in the next failure domain.

The rank writes blocks into its memory and says so (`MirrorSender.wrote`). In that call, the bytes
are given to the kernel, which does not wait: so what was written before a gradient was sent is on
its way before that gradient, also if the process is killed right after. Only when the network lags
does a thread send the rest, and then each block as it is by then: the newest contents, in bounded
memory. A link that breaks is said once; training goes on without a mirror until the next restart.

    look     each rank that may have other hosts listens, and tells its place in the first round of
             the restore; in the answer is who holds whose mirror (`arranged`), and a token
    begin    each rank connects to its holder, and sends its memory
    end      the next restart, or the end of the job: the holder reads what has arrived, and no more

Why no mirror has a state that was not: both memories are alike byte by byte, so the reader's
checksums tell a block that has arrived in part, or was sent while it was written to. A complete
block says what the rank's state was after one step of one branch, which stays true: in a mirror
that lags, in one of an earlier iteration, in one that a killed holder has left to its replacement,
and if the rank is on another host by now. What has not arrived is not there, and no step is chosen
for which a rank's state is missing. The mirror of another job is that of another folder.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from outlast.async_checkpoint.environment import may_have_other_hosts, own_address
from outlast.async_checkpoint.peer_copies.arrangement import Place, holders, token_of
from outlast.async_checkpoint.peer_copies.transfer import Connection, ConnectionRefused
from outlast.async_checkpoint.storage.entries import is_count
from outlast.system.error_text import describe
from outlast.system.parallel import start_thread
from outlast.system.shared_memory import SharedMemory, available_bytes
from outlast.system.sockets import accepted, listen, stop

log = logging.getLogger("outlast.checkpoint")

_FRAME = struct.Struct("<QQ")  # the place in the memory, and the size of what follows
_JOIN_S = 10.0
_MAX_CONNECTIONS = 64


class MirrorSender:
    """Sends what is written to `memory`, in blocks of `block_bytes`, to the mirror at an address.
    `host` is its host, for messages. One thread writes, and calls `wrote`.
    """

    def __init__(
        self, memory: SharedMemory, block_bytes: int, to: tuple[str, int], token: str, host: str
    ) -> None:
        self._memory, self._block_bytes, self._host = memory, block_bytes, host
        self._used: dict[int, int] = {}  # by block, the size of what is in it
        self._late: set[int] = set()  # the blocks that the thread sends
        self._queue: queue.SimpleQueue[int | bytes | None] = queue.SimpleQueue()
        self._given, self._done = 1, 0  # to the thread: the link is idle when they are equal
        self._connection: Connection | None = None
        self._closed = False
        self._thread = start_thread("outlast-mirror", self._run, to, token)

    def wrote(self, *places: tuple[int, int]) -> None:
        """The bytes in these places (offset and size, at the beginning or within a block) have
        changed. Does not wait.
        """
        if self._closed:
            return
        is_late = self._given != self._done
        for at, size in places:
            block, within = divmod(at, self._block_bytes)
            self._used[block] = self._used[block] if within else size
            if is_late:
                self._late.add(block)
                self._give(block)
        if is_late:
            return
        assert self._connection is not None
        try:
            if rest := self._connection.send_now(b"".join(self._frame(*each) for each in places)):
                self._give(rest)
        except OSError as e:
            self._break(e)
        except BaseException:  # an interrupt: nobody knows how much was sent
            self.close()
            raise

    def close(self) -> None:
        """Sends no more than what the kernel has."""
        self._closed = True
        self._queue.put(None)
        if self._connection is not None:
            self._connection.cut()

    def _give(self, item: int | bytes) -> None:
        self._given += 1
        self._queue.put(item)

    def _frame(self, at: int, size_bytes: int) -> bytes:
        return _FRAME.pack(at, size_bytes) + self._memory.view[at : at + size_bytes]

    def _break(self, error: Exception) -> None:
        if not self._closed:
            log.warning(
                "this rank's own state is no longer mirrored on host %s (%s): if this host is lost "
                "before the next restart, a checkpoint is loaded",
                self._host,
                describe(error),
            )
        self.close()

    def _run(self, to: tuple[str, int], token: str) -> None:
        try:
            with contextlib.closing(Connection.open(*to, token)) as connection:
                connection.send_frame({"size_bytes": self._memory.size_bytes})
                self._connection = connection
                self._done += 1
                while not self._closed and (item := self._queue.get()) is not None:
                    if isinstance(item, bytes):
                        connection.send(memoryview(item))
                    elif item in self._late:
                        self._late.remove(item)  # first: it may be written to meanwhile
                        frame = self._frame(item * self._block_bytes, self._used[item])
                        connection.send(memoryview(frame))
                    self._done += 1
        except (OSError, EOFError, ValueError, ConnectionRefused) as e:
            self._break(e)


class MirrorServer:
    """Receives the mirrors of other ranks at `address`, from processes that know the token. `keep`
    is called with the memory of each one and a name, to keep it over a kill of this process.
    """

    def __init__(self, address: str, keep: Callable[[SharedMemory, str], object]) -> None:
        self.address, self._keep = address, keep
        self._listener = listen(address)
        self.port = int(self._listener.getsockname()[1])
        self._memories: list[SharedMemory] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def begin(self, token: str) -> None:
        self._threads.append(start_thread("outlast-mirrors", self._accept_all, token))

    def end(self) -> list[SharedMemory]:
        """Receives what has arrived, and no more. Returns the mirrors, the oldest one first."""
        stop(self._listener)
        for thread in self._threads[:1]:
            thread.join(_JOIN_S)
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RD)  # what has arrived can be read before the end
        for thread in self._threads[1:]:
            thread.join(_JOIN_S)
        return self._memories

    def _accept_all(self, token: str) -> None:
        for sock in accepted(self._listener):
            if len(self._sockets) == _MAX_CONNECTIONS:
                sock.close()
                continue
            self._sockets.append(sock)
            self._threads.append(start_thread("outlast-mirror-of", self._serve, sock, token))

    def _serve(self, sock: socket.socket, token: str) -> None:
        # The errors of a client, perhaps of another program, concern only that client: a rank says
        # that its link is broken.
        try:
            with sock:
                self._receive(sock, Connection.accept(sock, token))
        except (OSError, EOFError, ValueError, KeyError, ConnectionRefused) as e:
            log.debug("a mirror has ended: %s", describe(e))
        finally:
            self._sockets.remove(sock)

    def _receive(self, sock: socket.socket, connection: Connection) -> None:
        size_bytes = connection.receive_frame()["size_bytes"]
        if not is_count(size_bytes) or size_bytes > available_bytes():
            raise ValueError(f"a memory of {size_bytes!r} bytes")
        memory = SharedMemory(size_bytes)
        self._memories.append(memory)
        self._keep(memory, f"mirror {len(self._memories)}")
        sock.settimeout(None)  # until the restart: training may pause
        header = memoryview(bytearray(_FRAME.size))
        while True:
            connection.receive_into(header)
            at, size = _FRAME.unpack(header)
            if at + size > memory.size_bytes:
                raise ValueError(f"{size} bytes at {at} of {memory.size_bytes}")
            connection.receive_into(memory.view[at : at + size])


class Mirrors:
    """The mirrors that a process holds. They outlive an iteration: those of the one before are
    released when the next one has begun, so that a fault finds them until there are newer ones.
    """

    def __init__(self, keep: Callable[[SharedMemory, str], object]) -> None:
        self._keep = keep
        self._server: MirrorServer | None = None
        self._ended: list[SharedMemory] = []
        self._older: list[SharedMemory] = []

    def adopt(self, found: Mapping[str, SharedMemory]) -> None:
        """Adds the mirrors of a dead process, whose place this one has."""
        self._ended += found.values()
        for name, memory in found.items():
            self._keep(memory, name)

    def collect(self) -> list[SharedMemory]:
        """The mirrors, with all that has arrived; nothing more is received."""
        if self._server is not None:
            self._ended += self._server.end()
            self._server = None
        return [*reversed(self._ended), *self._older]

    def offer(self) -> list[Any]:
        """What a rank tells of itself for `arranged`: its place, and where it listens: nowhere if
        all ranks are on this host.
        """
        place = Place.here()
        if may_have_other_hosts():
            try:
                self._server = MirrorServer(own_address(), self._keep)
            except OSError as e:
                log.warning(
                    "this rank mirrors no other one: it cannot listen at the address of its host "
                    "for others (%s): set OUTLAST_HOST_ADDR to it",
                    describe(e),
                )
        at = [] if self._server is None else [self._server.address, self._server.port]
        return [place.host, place.domain, *at]

    @staticmethod
    def arranged(offers: Sequence[Sequence[Any]]) -> dict[str, Any] | None:
        """On one rank, for all: where each rank's mirror is (host, address, port), and a token.
        `None` with one failure domain.
        """
        try:
            found = holders([Place(*each[:2]) for each in offers])
        except ValueError as e:
            log.warning("no rank's own state is mirrored: %s", e)
            return None
        if found is None:
            return None
        to = [[offers[rank][0], *offers[rank][2:]] for rank in found]
        return {"token": secrets.token_hex(32), "to": to}

    def accept(
        self, arrangement: Mapping[str, Any] | None, rank: int
    ) -> Callable[[SharedMemory, int], MirrorSender] | None:
        """From now on, receives what ranks send that have this, the result of `arranged`. Returns
        what begins to mirror a memory of this rank, with blocks of a size; `None` if none does.
        """
        if arrangement is None:
            self.collect()
            return None
        token = token_of(arrangement["token"])
        if self._server is not None:
            self._server.begin(token)
        host, *to = arrangement["to"][rank]
        return partial(MirrorSender, to=tuple(to), token=token, host=host) if to else None

    def begun(self) -> None:
        """The next iteration has begun."""
        for memory in self._older:
            memory.close()
        self._older, self._ended = list(reversed(self._ended)), []

    def close(self) -> None:
        for memory in self.collect():
            memory.close()
        self._ended, self._older = [], []

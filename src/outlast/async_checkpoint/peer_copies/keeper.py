"""The keeper: a process beside each rank that sends its snapshots to another host's keeper, and
holds the copies that such a keeper has sent.

It is a separate program, without torch and with low priority; `client.py` starts it and talks to
it. It maps the snapshot buffers of the main process, and uses its own connections: nothing of this
passes through the training's process groups. What it holds survives the main process. When that
ends without a goodbye, the keeper waits for a while, as a writer does (`writer/handover.py`), for
another keeper of this host, which takes the copies over: the one of the replacement process, or one
of a rank that has survived. It ends at once when the process that would start a replacement is gone
too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any, cast

from outlast.async_checkpoint.peer_copies.content import HeldCopies, HeldCopy
from outlast.async_checkpoint.peer_copies.messages import (
    Arrange,
    Arranged,
    Copies,
    DescribeCopies,
    KeepOnly,
    SendCopy,
)
from outlast.async_checkpoint.peer_copies.server import CopyServer
from outlast.async_checkpoint.peer_copies.transfer import Transfer
from outlast.async_checkpoint.writer.handover import (
    Announcement,
    HandedOver,
    hand_over,
    take_over,
)
from outlast.async_checkpoint.writer.messages import (
    Done,
    Goodbye,
    HeldSnapshot,
    Message,
    RequestFailed,
    decode,
    encode,
)
from outlast.errors import CheckpointError
from outlast.system.background_process import settle
from outlast.system.channel import Channel, unpack
from outlast.system.error_text import describe
from outlast.system.processes import open_process
from outlast.system.shared_memory import SharedMemory
from outlast.system.waiting import readable

_NICE = 10  # below the writer: a checkpoint on storage comes first


class Keeper:
    """The keeper process. `config`: `main` and `launcher` are process ids; `socket` is where it
    hands its copies over, `sockets` a pattern for those of all keepers of this folder and host.
    """

    def __init__(self, channel: Channel, config: dict[str, Any]) -> None:
        self.channel = channel
        parent = os.getppid()
        self.main_process = open_process(parent) if parent == config["main"] else None
        self.copies = HeldCopies()
        self.announcement = Announcement(config["main"])
        self._socket = Path(config["socket"])
        self._sockets = str(config["sockets"])
        self._lingers = config["linger_s"] > 0
        self._server: CopyServer | None = None
        self._token = ""
        self._bytes_per_s = 1.0
        self._transfer = Transfer()

    def serve(self) -> bool:
        """Serves the main process until it is gone; returns whether it said goodbye."""
        main_process = () if self.main_process is None else (self.main_process,)
        while True:
            # A fork of the main process may hold the channel open longer.
            if self.channel.fileno() not in readable(self.channel.fileno(), *main_process):
                return False
            try:
                payload, descriptors = self.channel.receive()
            except EOFError:
                return False
            request, number = decode(payload)
            match request:
                case Goodbye():
                    return True
                case SendCopy():
                    memory = SharedMemory(request.size_bytes, descriptors[0])
                    self._transfer = Transfer()
                    threading.Thread(
                        target=self._send,
                        args=(self._transfer, request, memory, number),
                        name="outlast-send",
                        daemon=True,
                    ).start()
                case _:
                    self._answer(number, self._carry_out(request))

    def handed_over(self) -> list[HandedOver]:
        """The copies, as another keeper takes them over."""
        return [
            HandedOver(
                cast(HeldSnapshot, {**copy.snapshot, "buffer": 0, "socket": str(self._socket)}),
                copy.values,
                copy.memory.descriptor,
            )
            for copy in self.copies.all()
        ]

    def close(self) -> None:
        """Stops sending and listening."""
        self._transfer.cancel()
        if self._server is not None:
            self._server.close()

    def _carry_out(self, request: Message) -> Message:
        try:
            match request:
                case Arrange():
                    return self._arrange(request)
                case KeepOnly():
                    self.copies.keep_only(request.save_ids)
                    return Done()
                case DescribeCopies():
                    return Copies(copies=[copy.snapshot for copy in self.copies.all()])
                case _:
                    raise TypeError(f"{type(request).__name__} is no request")
        except Exception as e:  # noqa: BLE001 - the main process raises it
            return RequestFailed(error=describe(e), traceback="")

    def _arrange(self, request: Arrange) -> Arranged:
        # First: the main process may write into its buffers once this is answered.
        self._transfer.cancel()
        self._token, self._bytes_per_s = request.token, request.bytes_per_s
        if self._server is not None and self._server.address != request.address:
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = CopyServer(request.address, request.token, self.copies, self._received)
        else:
            self._server.change_token(request.token)
        self._adopt_copies()
        return Arranged(port=self._server.port)

    def _adopt_copies(self) -> None:
        """Takes over the copies of keepers of this host whose main process is dead."""
        folder, pattern = os.path.split(self._sockets)
        for announced in sorted(Path(folder).glob(pattern)):
            path = announced.with_suffix(".sock")
            if path == self._socket:
                continue
            for handed in take_over(path).snapshots:
                size = os.fstat(handed.descriptor).st_size
                copy = HeldCopy(
                    handed.snapshot, handed.values, SharedMemory(size, handed.descriptor)
                )
                self.copies.add(copy)
                self._received(copy)

    def _received(self, _: HeldCopy) -> None:
        if self._lingers:
            self.announcement.place(self._socket)

    def _send(
        self, transfer: Transfer, request: SendCopy, memory: SharedMemory, number: int
    ) -> None:
        answer: Message = Done()
        try:
            transfer.send(
                (request.address, request.port),
                self._token,
                self._bytes_per_s,
                request.snapshot,
                memory,
                request.blob,
            )
        except CheckpointError as e:
            answer = RequestFailed(error=str(e), traceback="")
        except Exception as e:  # noqa: BLE001 - the main process reports it
            answer = RequestFailed(error=describe(e), traceback="")
        finally:
            memory.close()
        self._answer(number, answer)

    def _answer(self, number: int, answer: Message) -> None:
        with contextlib.suppress(OSError):  # `serve` notices that the main process is gone
            self.channel.send(encode(answer, number))


def main() -> None:
    """Runs the keeper."""
    channel = settle(nice=_NICE, ends_with_parent=False)
    config = unpack(sys.argv[1].encode())[0]
    launcher = open_process(config["launcher"])
    keeper = Keeper(channel, config)
    try:
        if not keeper.serve() and keeper.main_process is not None and config["linger_s"] > 0:
            # The channel may end before the process does.
            readable(keeper.main_process, timeout=config["linger_s"])
            keeper.close()
            hand_over(keeper.handed_over(), config["linger_s"], launcher, keeper.announcement)
        keeper.announcement.withdraw()
    finally:
        os._exit(0)  # threads in the middle of a transfer must not hold up the end


if __name__ == "__main__":
    main()

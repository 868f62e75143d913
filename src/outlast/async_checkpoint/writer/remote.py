"""A process beside the main process: how its methods are called, and its life.

The main process calls the methods of a `Service` by their names (`writer/client.py`). A call is a
JSON object on the channel: the method, its arguments, and the number of the call, 0 if it has no
answer. The bytes of the argument `blob` follow it, the descriptor of the argument `memory` is
attached. Calls without an answer are carried out at once, in the order in which they arrive; the
others in the same order, by a thread of their own, which answers them.

When the main process ends without a goodbye, the service waits for a while at a socket, hands its
snapshots to the replacement that connects (`handover.py`), and ends. It ends at once when the
process that would start a replacement (the launcher: the parent of the main process) is gone too,
so it is never left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import sys
from collections.abc import Callable, Sequence
from typing import Any

from outlast.async_checkpoint.writer.handover import Announcement, StoredSnapshot, hand_over
from outlast.async_checkpoint.writer.write_files import Dropped
from outlast.errors import CheckpointError
from outlast.system.background_process import settle
from outlast.system.channel import Channel, pack, unpack
from outlast.system.error_text import describe, traceback_text
from outlast.system.parallel import start_thread
from outlast.system.processes import open_process, readable
from outlast.system.shared_memory import SharedMemory


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a method of another process."""

    method: str
    arguments: dict[str, Any]
    number: int = 0

    def send(self, channel: Channel) -> None:
        arguments = dict(self.arguments)
        blob = arguments.pop("blob", b"")
        descriptors = []
        if "memory" in arguments:
            descriptors.append(arguments["memory"].descriptor)
            arguments["memory"] = arguments["memory"].size_bytes
        header = {"method": self.method, "arguments": arguments, "number": self.number}
        channel.send(pack(header, blob), descriptors)

    @classmethod
    def receive(cls, channel: Channel) -> Call:
        payload, descriptors = channel.receive()
        header, blob = unpack(payload)
        call = cls(**header)
        if blob:
            call.arguments["blob"] = blob
        if descriptors:
            call.arguments["memory"] = SharedMemory(call.arguments["memory"], descriptors[0])
        return call


class Service:
    """A process that serves its main process. `config`: `main` and `launcher` are process ids,
    `linger_s` is how long it waits for a replacement of the main process.
    """

    def __init__(self, channel: Channel, config: dict[str, Any]) -> None:
        self.channel = channel
        parent = os.getppid()
        self.main_process = open_process(parent) if parent == config["main"] else None
        self.launcher = open_process(config["launcher"])
        self.linger_s = float(config["linger_s"])
        self.announcement = Announcement(config["main"])
        self.requests: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.kept: dict[str, SharedMemory] = {}  # given to a replacement besides the snapshots
        self._goodbye = False
        self.answering = start_thread("outlast-answers", self._answer_all)

    def goodbye(self) -> None:
        self._goodbye = True

    def snapshots(self) -> Sequence[StoredSnapshot]:
        """What a replacement of the main process gets."""
        raise NotImplementedError

    def tidy_up(self) -> None:
        """Called at the end."""

    def accept(self, request: Call) -> None:
        """Called in the thread that receives, for a call with an answer."""
        self.requests.put(request)

    def explain(self, error: Exception) -> str:
        return describe(error)

    def serve(self) -> bool:
        """Serves the main process until it is gone; returns whether it said goodbye."""
        main_process = () if self.main_process is None else (self.main_process,)
        while not self._goodbye:
            # A fork of the main process may hold the channel open for longer than that lives. Calls
            # that were sent before its end are still received.
            if self.channel.fileno() not in readable(self.channel.fileno(), *main_process):
                return False
            try:
                call = Call.receive(self.channel)
            except EOFError:
                return False
            if call.number:
                self.accept(call)
            else:
                getattr(self, call.method)(**call.arguments)
        return True

    def announce(self, socket: str) -> None:
        """Announces that a replacement of the main process will find something at this socket."""
        if self.linger_s > 0:
            self.announcement.place(socket)

    def answer(self, request: Call) -> None:
        try:
            answer = {"value": getattr(self, request.method)(**request.arguments)}
        except Dropped:
            answer = {"dropped": True}
        except Exception as e:  # noqa: BLE001 - the main process raises it
            outside = isinstance(e, OSError | CheckpointError)  # such as the disk: no mistake here
            answer = {"error": self.explain(e), "outside": outside, "traceback": traceback_text(e)}
        with contextlib.suppress(OSError):  # `serve` notices that the main process is gone
            self.channel.send(pack({"number": request.number, **answer}))

    def _answer_all(self) -> None:
        while (request := self.requests.get()) is not None:
            self.answer(request)


def run(make: Callable[[Channel, dict[str, Any]], Service], nice: int) -> None:
    """The program of a service."""
    channel = settle(nice=nice, ends_with_parent=False)
    service = make(channel, unpack(sys.argv[1].encode())[0])
    try:
        if not service.serve() and service.main_process is not None and service.linger_s > 0:
            # The channel may end before the process does.
            readable(service.main_process, timeout=service.linger_s)
            hand_over(
                service.announcement,
                service.snapshots(),
                service.kept,
                service.linger_s,
                service.launcher,
            )
        service.announcement.withdraw()
        service.tidy_up()
    finally:
        os._exit(0)  # threads in the middle of a write or a transfer must not hold up the end

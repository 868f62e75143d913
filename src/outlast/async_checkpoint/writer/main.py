"""The writer process: writes snapshots to storage, checksums them, and keeps the last ones.

A program of its own (see `writer/client.py` for the side that starts it), without torch, of low
priority. It holds the memories of the main process, so the snapshots outlive that. When the main
process ends without a word of goodbye, it lingers for a while on a socket in a private folder, and
hands the memories to the successor that asks; then it ends. It ends at once when the process that
would start a successor (the launcher: the main process's own parent) is gone too, so it is never
left behind.

Messages are a line of JSON and, behind it, bytes (see `pack`). A request is answered in the order
of its kind: writing is done by one thread, everything else at once. What has been taken out of
sight is removed by another thread, beside the saves that follow.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from typing import Any

from outlast.async_checkpoint.snapshot.shared_memory import SharedMemory
from outlast.async_checkpoint.storage.open import open_storage
from outlast.async_checkpoint.writer.copy_progress import CopyProgress
from outlast.async_checkpoint.writer.handover import HandedOver, hand_over
from outlast.async_checkpoint.writer.write_files import Dropped, checksums_of, write_files
from outlast.system.background_process import settle
from outlast.system.channel import Channel, pack, unpack
from outlast.system.error_text import describe, traceback_text
from outlast.system.processes import open_process
from outlast.system.waiting import readable

__all__ = ["main"]


class Writer:
    """The writer process's state: memories, the snapshots that lie in them, the work to do."""

    def __init__(self, channel: Channel, config: dict[str, Any]) -> None:
        self.channel = channel
        parent = os.getppid()
        self.main_process = open_process(parent) if parent == config["main"] else None
        self.config = config
        self.storage = open_storage(config["url"])
        self.memories: dict[int, SharedMemory] = {}
        self.snapshots: dict[int, dict[str, Any]] = {}
        self.values: dict[int, bytes] = {}
        self.indexes: dict[int, bytes] = {}
        self.dropped = threading.Event()
        # Of snapshots that are written, or will be: by the memory and the save.
        self.progress: dict[tuple[int, str], CopyProgress] = {}
        self.written: dict[int, tuple[str, dict[str, Any]]] = {}
        self._work: queue.SimpleQueue[tuple[dict[str, Any], bytes] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write_all, name="outlast-writer", daemon=True).start()
        self._removals: queue.Queue[str] = queue.Queue()
        self._late: list[str] = []  # errors of removals, until somebody asks
        threading.Thread(target=self._remove_all, name="outlast-remover", daemon=True).start()

    def serve(self) -> bool:
        """Serves the main process until it is gone; says whether it said goodbye."""
        while True:
            try:
                self._await_message()
                payload, descriptors = self.channel.receive()
            except EOFError:
                # Nobody can commit what is being written now: the main process would have to.
                self._drop()
                return False
            request, blob = unpack(payload)
            if request["op"] == "bye":
                return True
            self._take(request, blob, descriptors)

    def _await_message(self) -> None:
        """Waits for a message, or for the end of the main process: a fork of that may hold the
        channel open. What it had sent before it ended is still read.
        """
        main_process = () if self.main_process is None else (self.main_process,)
        if self.channel.fileno() not in readable(self.channel.fileno(), *main_process):
            raise EOFError("the main process is gone")

    def _take(self, request: dict[str, Any], blob: bytes, descriptors: list[int]) -> None:
        op = request["op"]
        if op == "buffer":
            old = self.memories.pop(request["buffer"], None)
            self._reuse(request["buffer"])
            if old is not None:
                old.close()
            self.memories[request["buffer"]] = SharedMemory(request["size_bytes"], descriptors[0])
            self.indexes[request["buffer"]] = blob
        elif op == "reuse":
            # From here on the main process writes into the memory: what lay there is no more. It
            # was told before the first byte is written, so this holds also if it dies next.
            self._reuse(request["buffer"])
        elif op == "copied":
            self._progress(request["buffer"], request["save_id"]).reached(request["upto"])
        elif op == "torn":
            self._progress(request["buffer"], request["save_id"]).tear()
        elif op == "sealed":
            snapshot = request["snapshot"]
            self.values[request["buffer"]] = blob
            self.snapshots[request["buffer"]] = snapshot
            # `_do` looks the other way round: one of the two finds both.
            self._take_checksums(request["buffer"])
            self._progress(request["buffer"], snapshot["save_id"]).reached(sys.maxsize)
        elif op == "committed":
            snapshot = self.snapshots.get(request["buffer"])
            if snapshot is not None and snapshot["save_id"] == request["save_id"]:
                snapshot["committed"] = True
        elif op == "release":
            self._reuse(request["buffer"])
            self.values.pop(request["buffer"], None)
            if (memory := self.memories.pop(request["buffer"], None)) is not None:
                memory.close()
        elif op == "drop":
            self._drop()
        else:
            self._work.put((request, blob))

    def _reuse(self, memory: int) -> None:
        """What lay in the memory is no more, and nobody waits for more of it."""
        self.snapshots.pop(memory, None)
        self.written.pop(memory, None)
        for key in [key for key in list(self.progress) if key[0] == memory]:
            self.progress.pop(key).tear()

    def _drop(self) -> None:
        self.dropped.set()
        for progress in list(self.progress.values()):
            progress.wake()

    def _progress(self, memory: int, save_id: str) -> CopyProgress:
        return self.progress.setdefault((memory, save_id), CopyProgress())

    def _take_checksums(self, memory: int) -> None:
        """Gives a snapshot the checksums that it was written with."""
        snapshot, written = self.snapshots.get(memory), self.written.get(memory)
        if snapshot is not None and written is not None and snapshot["save_id"] == written[0]:
            snapshot["files"] = written[1]

    def _write_all(self) -> None:
        while (work := self._work.get()) is not None:
            request, blob = work
            try:
                answer = self._do(request, blob)
            except Dropped:
                answer = {"dropped": True}
            except Exception as e:  # noqa: BLE001 - the main process raises it
                answer = {
                    "error": describe(e),
                    "traceback": traceback_text(e),
                }
            # The main process is gone: `serve` sees that too.
            with contextlib.suppress(OSError):
                self.channel.send(pack({**answer, "id": request["id"]}))

    def _do(self, request: dict[str, Any], blob: bytes) -> dict[str, Any]:
        op = request["op"]
        if op == "begin":  # what was dropped before this is not this
            self.dropped.clear()
            return {}
        if op == "write":
            number, save_id = request["buffer"], request["save_id"]
            progress = self._progress(number, save_id)
            written = write_files(
                self.storage,
                request["folder"],
                self.memories[number].view,
                request["files"],
                {request["values"]: blob} if blob else {},
                threads=self.config["threads"],
                dropped=self.dropped,
                filled=lambda upto: progress.wait_for(upto, self.dropped),
                hashes=not request["hashed"],
                make_room=self._make_room,
            )
            if request["hashed"]:  # on the way here: the snapshot comes with its checksums
                return {}
            self.written[number] = (save_id, written)
            self._take_checksums(number)
            return {"files": written}
        if op == "commit":
            at = 0
            for name, size_bytes in request["puts"]:  # the manifest is the last of them
                if name == request["manifest"] and request["working"] == request["final"]:
                    self.storage.sync(request["working"])
                self.storage.put(request["working"], name, blob[at : at + size_bytes])
                at += size_bytes
            self.storage.sync(request["working"])
            self.storage.publish(request["working"], request["final"])
            return {}
        if op == "remove":
            for folder in request["folders"]:
                self.storage.remove(folder)
            return {}
        if op == "retire":
            for folder in request["folders"]:
                if hidden := self.storage.hide(folder):
                    self._removals.put(hidden)
            return {"late": self._errors_of_removals()}
        if op == "settle":
            if request["tidy"]:
                self._make_room()
            else:
                self._removals.join()
            return {"late": self._errors_of_removals()}
        if op == "snapshots":
            return {"snapshots": self.described()}
        raise ValueError(f"unknown request {op!r}")

    def _make_room(self) -> None:
        self._removals.join()
        self.storage.tidy()

    def _remove_all(self) -> None:
        """Removes what nobody sees any more. That may take a third of what a save takes: a file
        system that tells its disk which blocks are free waits for it. The next save does not.
        """
        while True:
            folder = self._removals.get()
            try:
                self.storage.recycle(folder)
            except Exception as e:  # noqa: BLE001 - whatever it is, somebody must hear of it
                self._late.append(f"{folder}: {e}")
            finally:
                self._removals.task_done()

    def _errors_of_removals(self) -> list[str]:
        late, self._late = self._late, []
        return late

    def described(self) -> list[dict[str, Any]]:
        """The snapshots that are whole, with their checksums."""
        found = []
        for number, snapshot in list(self.snapshots.items()):
            if snapshot.get("files") is None:  # sealed, but not yet written and hashed
                snapshot["files"] = checksums_of(
                    self.memories[number].view,
                    snapshot["layout"],
                    {snapshot["values"]: self.values[number]} if snapshot["values"] else {},
                )
            index = self.indexes.get(number, b"").decode()
            found.append({**snapshot, "buffer": number, "index": index})
        return found

    def estate(self) -> list[HandedOver]:
        """What a successor of the main process can use."""
        return [
            HandedOver(
                snapshot, self.values.get(snapshot["buffer"], b""), self._descriptor_of(snapshot)
            )
            for snapshot in self.described()
        ]

    def _descriptor_of(self, snapshot: dict[str, Any]) -> int:
        return self.memories[snapshot["buffer"]].descriptor


def main() -> None:
    """Runs the writer process."""
    # Less than the training, but not so little that a save takes for ever on a busy machine: then
    # the training would wait for it in the end.
    channel = settle(nice=5, ends_with_parent=False)
    config = unpack(sys.argv[1].encode())[0]
    launcher = open_process(config["launcher"])
    writer = Writer(channel, config)
    try:
        if not writer.serve() and writer.main_process is not None and config["linger_s"] > 0:
            # The channel may end before the process does.
            readable(writer.main_process, timeout=config["linger_s"])
            hand_over(writer.estate(), config["linger_s"], launcher)
    finally:
        os._exit(0)  # threads that are in the middle of a write have nobody to write for


if __name__ == "__main__":
    main()

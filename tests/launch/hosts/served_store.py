"""A store server in a thread, over a store in memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import TypeVar

from outlast.coordination.replicated.operations import Failed, Keys, Operation, Result
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.server.combining import Done, Upstream
from outlast.launch.hosts.server.store_server import StoreServer

NET_S = 60.0

T = TypeVar("T")


class Model:
    """The store of all hosts, as simple as it can be: what each operation means."""

    def __init__(self) -> None:
        self.table: dict[str, bytes] = {}

    def perform(self, op: Operation) -> Result:
        table, held = self.table, self.table.get(op.key)
        match op.name:
            case "put":
                table[op.key] = op.value
            case "append":
                table[op.key] = (held or b"") + op.value
            case "claim":
                return table.setdefault(op.key, op.value)
            case "add":
                try:
                    total = int(held or b"0") + op.amount
                except ValueError:
                    return Failed(f"{op.key!r} is not a number")
                table[op.key] = str(total).encode()
                return total
            case "compare_set":
                if (held or b"") == op.expected:
                    table[op.key] = op.value
                return table.get(op.key)
            case "delete":
                return 0 if table.pop(op.key, None) is None else 1
            case "read" | "wait_for":
                return held
            case "check":
                return int(op.key in table)
            case "keys":
                return Keys(tuple(sorted(key for key in table if key.startswith(op.key))))
            case "batch":
                return [self.perform(part) for part in op.operations]
            case _:
                raise AssertionError(op)
        return None


class MemoryUpstream:
    """A store of all hosts that answers at the next iteration of the loop."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop, self.model = loop, Model()
        self.sent: list[Operation] = []
        self._waits: dict[int, tuple[Operation, Done]] = {}
        self._number = 0
        self.failed = ""
        self.on_wait: threading.Event | None = None  # set when a wait begins

    def submit(self, operation: Operation, done: Done) -> Hashable:
        self.sent.append(operation)
        self._number += 1
        self._waits[self._number] = operation, done
        number = self._number
        self._loop.call_later(0.0, lambda: self._perform(number))
        return number

    def cancel(self, handle: Hashable) -> None:
        assert isinstance(handle, int)
        self._waits.pop(handle, None)

    @property
    def waiting(self) -> list[str]:
        return [op.key for op, _ in self._waits.values() if op.name == "wait_for"]

    def _perform(self, number: int) -> None:
        if number not in self._waits:
            return
        operation, done = self._waits[number]
        result: Result = Failed(self.failed) if self.failed else self.model.perform(operation)
        if operation.name == "wait_for" and result is None:
            if self.on_wait is not None:
                self.on_wait.set()
            return
        del self._waits[number]
        done(result)
        for other in [n for n, (op, _) in self._waits.items() if op.key in self.model.table]:
            self._perform(other)


class ServedStore:
    """The server, and calls to its thread."""

    def __init__(self, loop: EventLoop, upstream: Upstream) -> None:
        self.loop = loop
        self.server = StoreServer(loop, upstream)
        self.port = self.server.port

    def call(self, function: Callable[[], T]) -> T:
        """Calls `function` in the thread of the loop."""
        results: list[T] = []
        done = threading.Event()

        def work() -> None:
            try:
                results.append(function())
            finally:
                done.set()

        self.loop.call_from_thread(work)
        assert done.wait(NET_S)
        return results[0]


@contextlib.contextmanager
def served(make: Callable[[EventLoop], Upstream] = MemoryUpstream) -> Iterator[ServedStore]:
    with EventLoop() as loop:
        store = ServedStore(loop, make(loop))
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                loop.run_once()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield store
        finally:
            store.call(store.server.close)
            store.call(ended.set)
            thread.join()


class ServerProcess:
    """The server in a process of its own: some calls of torch's client hold the interpreter's lock
    while they wait.
    """

    def __enter__(self) -> ServerProcess:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._line())
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        assert self._process.returncode == 0

    def new_attempt(self) -> None:
        """Closes all connections; later ones find no keys."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line
        return line


def main() -> None:
    """Serves until standard input ends."""
    with served() as store:
        print(store.port, flush=True)
        for attempt, _ in enumerate(sys.stdin, start=1):
            store.call(partial(store.server.new_attempt, attempt))
            print(attempt, flush=True)


if __name__ == "__main__":
    main()

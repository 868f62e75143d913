"""Store servers of several hosts in one process, over one table: what real clients measure.

`python -m benchmarks.hosts.servers COUNT` prints the ports; then, for each line on standard input,
how many messages and operations the store of all hosts has got.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Hashable

from outlast.coordination.replicated.operations import Operation, Result
from outlast.coordination.replicated.table import Table
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.server.combining import Done
from outlast.launch.hosts.server.store_server import StoreServer


class _Store:
    """The table of all hosts; answers at the next iteration of the loop."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop, self._table = loop, Table()
        self._waits: dict[str, dict[int, Done]] = {}
        self._keys: dict[int, str] = {}
        self.messages = self.operations = 0

    def submit(self, operation: Operation, done: Done) -> Hashable:
        self.messages += 1
        self.operations += len(operation.operations) or 1
        number = self.messages
        if operation.name == "wait_for" and operation.key not in self._table.keys:
            self._keys[number] = operation.key
            self._waits.setdefault(operation.key, {})[number] = done
            return number
        found = operation.name == "wait_for"
        result = self._table.keys[operation.key] if found else self._table.perform(operation)
        self._later(done, result)
        appeared, self._table.appeared = self._table.appeared, []
        for key, value in appeared:
            for waiting in self._waits.pop(key, {}).values():
                self._later(waiting, value)
        return number

    def _later(self, done: Done, result: Result) -> None:
        self._loop.call_later(0.0, lambda: done(result))

    def cancel(self, handle: Hashable) -> None:
        assert isinstance(handle, int)
        self._waits.get(self._keys.pop(handle, ""), {}).pop(handle, None)


def main() -> None:
    with EventLoop() as loop:
        store = _Store(loop)
        servers = [StoreServer(loop, store) for _ in range(int(sys.argv[1]))]
        print(json.dumps([server.port for server in servers]), flush=True)
        ended: list[bool] = []

        def on_input() -> None:
            if os.read(0, 4096):
                print(json.dumps([store.messages, store.operations]), flush=True)
            else:
                ended.append(True)

        loop.watch(0, 1, on_input)
        while not ended:
            loop.run_once()
        for server in servers:
            server.close()


if __name__ == "__main__":
    main()

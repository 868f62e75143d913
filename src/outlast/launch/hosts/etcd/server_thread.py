"""The store server for the workers of this host, in a thread with an event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.etcd.upstream import EtcdUpstream
from outlast.launch.hosts.server.store_server import StoreServer


class ServerThread:
    """Serves the workers; `port` is the server's. Any thread may use it.

    Raises:
        LaunchError: if this host has no loopback address.
    """

    def __init__(self, upstream: EtcdUpstream) -> None:
        self._loop = EventLoop()
        self._loop.__enter__()
        try:
            self._server = StoreServer(self._loop, upstream)
        except BaseException:
            self._loop.__exit__()
            raise
        self.port = self._server.port
        self._end = False
        self._thread = threading.Thread(target=self._run, name="outlast store server", daemon=True)
        self._thread.start()

    def call(self, callback: Callable[[], None]) -> None:
        """Makes a call from the event loop."""
        self._loop.call_from_thread(callback)

    def new_attempt(self, attempt: int) -> None:
        """Returns when the server gives new clients the keys of `attempt`."""
        done = threading.Event()

        def change() -> None:
            self._server.new_attempt(attempt)
            done.set()

        self.call(change)
        done.wait()

    def fail(self, reason: str) -> None:
        """Closes the connections of the workers: this host may not act any more."""
        self.call(lambda: self._server.fail(reason))

    def close(self) -> None:
        """Ends the server and the thread."""

        def end() -> None:
            self._server.close()
            self._end = True

        self.call(end)
        self._thread.join()
        self._loop.__exit__()

    def _run(self) -> None:
        while not self._end:
            self._loop.run_once()

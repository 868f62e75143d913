"""The store server of a host whose group is in etcd: its thread, and its way to etcd."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from outlast.coordination.replicated.operations import Failed, Operation, Result
from outlast.coordination.stores.etcd.connection import Refused
from outlast.coordination.stores.etcd.store import EtcdStore
from outlast.coordination.stores.etcd.watch import Wait
from outlast.errors import StoreError
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.server.combining import Done
from outlast.launch.hosts.server.store_server import StoreServer
from outlast.system.parallel import start_thread

_THREADS = 8
_log = logging.getLogger(__name__)


class ServerThread:
    """Serves the workers, at `port`, once there is a `store`. Any thread may use it."""

    def __init__(self, store: Callable[[], EtcdStore]) -> None:
        self._upstream = EtcdUpstream(store, self.call)
        self._loop = EventLoop()
        self._loop.__enter__()
        try:
            self.server = StoreServer(self._loop, self._upstream)
        except BaseException:
            self._loop.__exit__()
            raise
        self.port = self.server.port
        self._end = False
        self._thread = start_thread("outlast store server", self._run)

    def call(self, work: Callable[[], None]) -> bool:
        """Have the thread call `work`; `False` if it is over and will not."""
        if not self._end:
            self._loop.call_from_thread(work)
        return not self._end

    def fail(self, reason: str) -> None:
        """Closes the connections of the workers: this host may not act any more."""
        self.call(lambda: self.server.fail(reason))

    def close(self) -> None:
        def end() -> None:
            self.server.close()
            self._end = True

        self.call(end)
        self._thread.join()
        self._loop.__exit__()
        self._upstream.close()

    def _run(self) -> None:
        while not self._end:
            self._loop.run_once()


class _Request:
    def __init__(self, operation: Operation, done: Done) -> None:
        self.operation, self.done = operation, done
        self.over = False
        self.wait: Wait | None = None


class EtcdUpstream:
    """Runs operations in a few threads. A wait occupies none: the store's one watch serves all.

    Args:
        store: gives the store, once there is one.
        call: makes a call from the event loop of the server; any thread may use it.
    """

    def __init__(
        self, store: Callable[[], EtcdStore], call: Callable[[Callable[[], None]], object]
    ) -> None:
        self._store, self._call = store, call
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="outlast etcd operation")
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, operation: Operation, done: Done) -> Hashable:
        request = _Request(operation, done)
        self._begin(request)
        return request

    def cancel(self, handle: Hashable) -> None:
        assert isinstance(handle, _Request)
        handle.over = True
        if handle.wait is not None:
            self._store().waits.cancel(handle.wait)

    def close(self) -> None:
        """Waits for the operations in flight, and starts no more."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, request: _Request) -> None:
        with self._lock:
            if not self._closed:
                self._pool.submit(self._run, request)

    def _run(self, request: _Request) -> None:
        if request.over:
            return
        result: Result
        try:
            store = self._store()
            if request.operation.name == "wait_for":
                base, value = store.base_of(request.operation.key), None
                revision = store.waits.absent_at(base)
                if revision is None:
                    value, revision = store.look(request.operation.key)
                result = value
                if value is None:
                    request.wait = store.waits.call_at(
                        base, base + b"\0", revision, partial(self._woken, request)
                    )
                    if request.over:  # canceled before there was a wait
                        store.waits.cancel(request.wait)
                    return
            else:
                result = store.perform(request.operation)
        except (StoreError, ValueError) as e:
            if isinstance(e.__cause__, Refused):  # the workers only see that their connection ends
                _log.warning("%s", e)
            result = Failed(str(e))
        self._call(lambda: self._answer(request, result))

    def _woken(self, request: _Request, value: bytes | None) -> None:
        if value is None:  # it is to be read
            self._begin(request)
        else:
            self._call(lambda: self._answer(request, value))

    def _answer(self, request: _Request, result: Result) -> None:
        if not request.over:
            request.over = True
            request.done(result)

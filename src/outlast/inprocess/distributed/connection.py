"""Connections to the store: retried until it is up, and broken off if it stops answering."""

from __future__ import annotations

import datetime
import inspect
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.stores.torch_store import TorchStore
from outlast.errors import RankTimeout, StoreError
from outlast.inprocess.distributed.torch_log import QuietTorchLog
from outlast.inprocess.environment import is_host_server
from outlast.inprocess.store import DEFAULT_TIMEOUT, StoreMixin
from outlast.system.error_text import first_line
from outlast.system.sockets import shut_down, socket_inodes

T = TypeVar("T")

_RETRY_S = 0.01  # after the timeout: how often to look for connections opened since


class Connection(TorchStore):
    """A `Store` with a separate connection, which another thread can break off."""

    def __init__(self, store: Any, where: str, sockets: dict[int, int]) -> None:
        super().__init__(store, where)
        self._sockets = sockets
        self._busy_since = 0.0

    def break_off_overdue(self, limit: float) -> None:
        """Breaks off an operation, other than a wait, that has taken longer than `limit` seconds,
        because the process serving the store hangs or its host is unreachable.
        """
        since = self._busy_since
        if since and time.monotonic() - since > limit:
            self.break_off()

    def _try(self, operation: Callable[[], T]) -> T:
        self._busy_since = time.monotonic()
        try:
            return super()._try(operation)
        finally:
            self._busy_since = 0.0

    @property
    def can_break_off(self) -> bool:
        """Whether `break_off` can end a wait: it can if the connection is a socket."""
        return bool(self._sockets)

    def close(self) -> None:
        """Closes the descriptor, even if this object is still referenced elsewhere."""
        self._sockets = {}
        self.torch_store = None

    def break_off(self) -> None:
        """Ends the connection: an operation blocked on it fails at once with a `StoreError`."""
        for descriptor, inode in self._sockets.items():
            shut_down(descriptor, inode)


def connect(
    factory: type[StoreMixin],
    kwargs: Mapping[str, Any],
    endpoint: tuple[str, int] | None,
    timeout: float,
    ready: str = "",
) -> Connection:
    """Connects to the store, which may still be starting.

    torch's client also waits, but for twice its timeout, and logs a line for each attempt; so a
    plain connection is tried first, until the server answers.

    Args:
        factory, kwargs: the wrapper's store factory and its keyword arguments.
        endpoint: host and port; `None` for a store without a server.
        timeout: in seconds.
        ready: a key that the server of this call sets. The previous call's server, which may still
            run on the same port, does not have it. Empty if one store serves all calls.

    Raises:
        RankTimeout: naming host and port, if there is no answer in time.
        StoreError: if the server is not such a store.
    """
    deadline = time.monotonic() + timeout
    retried = not ready
    while True:
        remaining = max(0.1, deadline - time.monotonic())
        try:
            connection = _connect_once(factory, kwargs, endpoint, remaining)
        except StoreError:
            # The previous call's server may end between the probe and the connection: once.
            if retried:
                raise
            retried = True
            continue
        if not ready:
            return connection
        try:
            with QuietTorchLog():  # the previous call's server may end meanwhile
                connection.wait_for(ready, max(0.1, deadline - time.monotonic()))
            return connection
        except KeyTimeout:
            raise RankTimeout(
                f"the store at {connection.where} did not serve this call within {timeout} s"
            ) from None
        except StoreError:  # the previous call's server has ended
            if time.monotonic() > deadline:
                raise


def _connect_once(
    factory: type[StoreMixin],
    kwargs: Mapping[str, Any],
    endpoint: tuple[str, int] | None,
    timeout: float,
) -> Connection:
    options = dict(kwargs)
    where = str(options.get("file_name", factory.__name__))
    if endpoint is not None:
        where = f"{endpoint[0]}:{endpoint[1]}"
        _await_server(endpoint, timeout)
        options.update(host_name=endpoint[0], port=endpoint[1])
    before = set(socket_inodes().values())
    limited = "timeout" in inspect.signature(factory).parameters and "timeout" not in options
    if limited:
        options["timeout"] = datetime.timedelta(seconds=timeout)
    # The process listening there may never answer; torch waits for the first answer forever.
    done = threading.Event()
    limit = threading.Thread(
        target=_shut_down_overdue, args=(before, endpoint, timeout, done), daemon=True
    )
    limit.start()
    try:
        with QuietTorchLog():
            store: Any = factory(**options)
    except RuntimeError as e:
        raise StoreError(f"{where} does not answer as a store: {first_line(e)}") from e
    finally:
        done.set()
        limit.join()
    if limited:
        store.set_timeout(DEFAULT_TIMEOUT)
    connection = Connection(store, where, _new_connections(before, endpoint))
    connection.one_request_reads = is_host_server(endpoint)
    return connection


def _shut_down_overdue(
    before: set[int], endpoint: tuple[str, int] | None, timeout: float, done: threading.Event
) -> None:
    """After `timeout` seconds, shuts down new connections repeatedly until `done` is set: torch's
    client may connect again, if its timeout starts later than this one.
    """
    wait = timeout
    while not done.wait(wait):
        wait = _RETRY_S
        for descriptor, inode in _new_connections(before, endpoint).items():
            shut_down(descriptor, inode)


def _new_connections(before: set[int], endpoint: tuple[str, int] | None) -> dict[int, int]:
    """The connections to the port of `endpoint` that are not in `before`: inode by descriptor.
    The port distinguishes them from sockets that other threads open in the meantime.
    """
    if endpoint is None:
        return {}
    new = {d: inode for d, inode in socket_inodes().items() if inode not in before}
    return {d: i for d, i in new.items() if (peer(d) or ("", -1))[1] == endpoint[1]}


def peer(descriptor: int) -> tuple[str, int] | None:
    """The peer's address and port; `None` if the socket has no peer, or the peer has no port."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            address = connection.getpeername()
    except OSError:
        return None
    if not isinstance(address, tuple):
        return None
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def _await_server(endpoint: tuple[str, int], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    pause = 0.002
    while True:
        try:
            with socket.create_connection(endpoint, timeout=max(0.1, deadline - time.monotonic())):
                return
        except OSError as e:
            # There is no event to wait for when a server starts.
            if time.monotonic() + pause > deadline:
                raise RankTimeout(
                    f"the store at {endpoint[0]}:{endpoint[1]} could not be reached within "
                    f"{timeout:.3g} s: {e}"
                ) from e
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

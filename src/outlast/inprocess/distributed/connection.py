"""Connections to the store: made with patience, broken when nobody can wait any longer."""

from __future__ import annotations

import contextlib
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
from outlast.errors import StoreError, TimeoutError
from outlast.inprocess.store import DEFAULT_TIMEOUT, StoreMixin
from outlast.system.error_text import first_line
from outlast.system.sockets import shut_down, socket_inodes

__all__ = ["Connection", "connect"]

T = TypeVar("T")


class Connection(TorchStore):
    """A `Store` over one connection of its own, which another thread can break."""

    def __init__(self, store: Any, where: str, sockets: dict[int, int]) -> None:
        super().__init__(store, where)
        self._sockets = sockets
        self._busy_since = 0.0

    def end_overdue(self, limit: float) -> None:
        """Breaks off an operation other than a wait that has taken longer than `limit` seconds:
        whoever serves the store is frozen, or out of reach without a word.
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
        """Whether `break_off` ends a wait: it is over a socket."""
        return bool(self._sockets)

    def close(self) -> None:
        """Gives the descriptor back, whoever may still hold this object."""
        self._sockets = {}
        self.torch_store = None

    def break_off(self) -> None:
        """Ends the connection: an operation that waits on it fails at once (`StoreError`)."""
        for descriptor, inode in self._sockets.items():
            shut_down(descriptor, inode)


def connect(
    factory: type[StoreMixin],
    kwargs: Mapping[str, Any],
    endpoint: tuple[str, int] | None,
    timeout: float,
    ready: str = "",
) -> Connection:
    """Connects to the store, which may still be on its way up.

    torch's own client waits as well, but twice as long as it is told, and with a log line a try;
    so first a plain connection is tried until the server is there.

    Args:
        factory, kwargs: of the wrapper.
        endpoint: host and port; `None` for a store without a server.
        timeout: in seconds.
        ready: a key that the server of this call has, and that of the call before, which may
            still be up at the same port, has not; empty if the store is there for all calls.

    Raises:
        TimeoutError: naming host and port, when nobody answers in time.
        StoreError: when somebody answers who is no such store.
    """
    deadline = time.monotonic() + timeout
    while True:
        connection = _connect_once(factory, kwargs, endpoint, max(0.1, deadline - time.monotonic()))
        if not ready:
            return connection
        try:
            connection.wait_for(ready, max(0.1, deadline - time.monotonic()))
            return connection
        except KeyTimeout:
            raise TimeoutError(
                f"the store at {connection.where} did not serve this call within {timeout} s"
            ) from None
        except StoreError:  # the server of the call before has ended
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
    # Somebody may listen there who never answers; torch waits for the first answer without limit.
    overdue = threading.Timer(timeout, _shut_down_new, (before, endpoint))
    overdue.daemon = True
    overdue.start()
    try:
        store: Any = factory(**options)
    except RuntimeError as e:
        raise StoreError(f"{where} does not answer as a store: {first_line(e)}") from e
    finally:
        overdue.cancel()
    if limited:
        store.set_timeout(DEFAULT_TIMEOUT)
    return Connection(store, where, _new_connections(before, endpoint))


def _shut_down_new(before: set[int], endpoint: tuple[str, int] | None) -> None:
    for descriptor, inode in _new_connections(before, endpoint).items():
        shut_down(descriptor, inode)


def _new_connections(before: set[int], endpoint: tuple[str, int] | None) -> dict[int, int]:
    """The connections to the port of `endpoint` that are not in `before`: inode by descriptor.
    Other threads may open sockets of their own meanwhile.
    """
    found: dict[int, int] = {}
    for descriptor, inode in socket_inodes().items():
        if inode in before or endpoint is None:
            continue
        with (
            contextlib.suppress(OSError),  # closed meanwhile, not connected, or to no port
            socket.socket(fileno=os.dup(descriptor)) as connection,
        ):
            if connection.getpeername()[1:2] == (endpoint[1],):
                found[descriptor] = inode
    return found


def _await_server(endpoint: tuple[str, int], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    pause = 0.002
    while True:
        try:
            with socket.create_connection(endpoint, timeout=max(0.1, deadline - time.monotonic())):
                return
        except OSError as e:
            # Nothing tells a client that a server is up: there is no event to wait for here.
            if time.monotonic() + pause > deadline:
                raise TimeoutError(
                    f"the store at {endpoint[0]}:{endpoint[1]} could not be reached within "
                    f"{timeout:.3g} s: {e}"
                ) from e
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

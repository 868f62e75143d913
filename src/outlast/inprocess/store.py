"""Stores of the job; `store_factory=` takes one of these classes, or a subclass.

If the launcher hosts a store (torchrun, `outlast run`), it serves `TCPStore`; otherwise the monitor
process of rank 0 does, so that the job survives the death of rank 0's main process.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.stores.tcp_client import SharedClient
from outlast.coordination.stores.torch_store import TorchStore, listening
from outlast.errors import InternalError, RankTimeout, StoreError
from outlast.inprocess.environment import is_host_server, master
from outlast.system.arguments import Duration, as_timedelta
from outlast.system.error_text import first_line

__all__ = ["FileStore", "PrefixStore", "StoreMixin", "TCPStore"]

DEFAULT_TIMEOUT = datetime.timedelta(seconds=300)
_ATTEMPT_S = 1.0
"""How long one attempt to connect takes, for a process that may give up meanwhile."""

Connection = SharedClient | TorchStore
"""A connection to the store of the job."""


class StoreMixin:
    """Makes a torch store usable as `store_factory`."""

    @classmethod
    def endpoint(cls, **kwargs: Any) -> tuple[str, int] | None:
        """Host and port of the store, if it needs a server; `None` for stores without one.
        `kwargs` are the wrapper's `store_kwargs`.
        """
        return None

    @classmethod
    def serve(cls, **kwargs: Any) -> Any:
        """Serves the store in this process as long as the returned object lives; the object has an
        attribute `port`.
        """
        raise NotImplementedError(f"{cls.__name__} has no server")


class TCPStore(dist.TCPStore, StoreMixin):  # type: ignore[misc,name-defined]
    """torch's TCP store. Host and port default to MASTER_ADDR and MASTER_PORT."""

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Duration = DEFAULT_TIMEOUT,
        wait_for_workers: bool = False,
        multi_tenant: bool = False,
        use_libuv: bool = True,
        master_listen_fd: int | None = None,
    ) -> None:
        host, number = self.endpoint(host_name=host_name, port=port) or ("127.0.0.1", 0)
        super().__init__(
            host_name=host,
            port=number,
            world_size=world_size,
            is_master=is_master,
            timeout=as_timedelta("timeout", timeout),
            wait_for_workers=wait_for_workers,
            multi_tenant=multi_tenant,
            use_libuv=use_libuv,
            **({} if master_listen_fd is None else {"master_listen_fd": master_listen_fd}),
        )

    @classmethod
    def endpoint(
        cls, host_name: str | None = None, port: int | None = None, **kwargs: Any
    ) -> tuple[str, int] | None:
        # Not by `read_launch`: on a reserve rank, the iteration's RANK is above its WORLD_SIZE.
        address, number = master()
        return host_name or address or "127.0.0.1", number if port is None else port

    @classmethod
    def serve(cls, **kwargs: Any) -> Any:
        """Serves on the host name's address only, and on no other interface. A `StoreError` names
        host and port if that address cannot be bound.
        """
        host, port = cls.endpoint(**kwargs) or ("127.0.0.1", 0)
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.create_server(address[:2], family=family, backlog=4096)
        except OSError as e:
            raise StoreError(f"the store cannot be served at {host}:{port}: {e.strerror}") from e
        chosen = listener.getsockname()[1]
        options = {**kwargs, "host_name": host, "port": chosen, "is_master": True}
        return cls(**{**options, **listening(listener.detach())})


class FileStore(dist.FileStore, StoreMixin):  # type: ignore[misc,name-defined]
    """torch's store in a file that all ranks share. It polls the file, so it is slower than TCP."""

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        super().__init__(file_name, world_size)


class PrefixStore(dist.PrefixStore, StoreMixin):  # type: ignore[misc,name-defined]
    """Adds `prefix` to every key of another store."""

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__(prefix, store)


def connect(
    factory: type[StoreMixin],
    kwargs: Mapping[str, Any],
    endpoint: tuple[str, int] | None,
    timeout: float,
    ready: str = "",
    give_up: Callable[[], bool] | None = None,
) -> Connection:
    """Connects to the store, which may still be starting.

    Args:
        factory, kwargs: the wrapper's store factory and its keyword arguments.
        endpoint: host and port; `None` for a store without a server.
        timeout: for this, and for each later operation other than a wait, in seconds.
        ready: a key that the server of this call sets. The previous call's server, which may still
            run on the same port, does not have it. Empty if one store serves all calls.
        give_up: whether to try no longer; asked about once a second.

    Raises:
        RankTimeout: naming host and port, if there is no answer in time.
        StoreError: if the server is not such a store.
    """
    deadline, pause = time.monotonic() + timeout, 0.002
    while True:
        connection = _open(factory, kwargs, endpoint, timeout)
        late: RankTimeout | StoreError
        try:
            if isinstance(connection, SharedClient):
                # Whoever listens there may be frozen, and never answer.
                connection.connect(None if give_up is None else _ATTEMPT_S)
            if ready:
                connection.wait_for(ready, max(0.1, min(1.0, deadline - time.monotonic())))
            return connection
        except KeyTimeout:
            late = RankTimeout(
                f"the store at {connection.where} did not serve this call within {timeout} s"
            )
        except StoreError as e:
            if e.__cause__ is None:
                raise
            late = RankTimeout(
                f"the store at {connection.where} could not be reached within {timeout:.3g} s: "
                f"{e.__cause__}"
            )
        connection.close()
        if time.monotonic() + pause > deadline or (give_up is not None and give_up()):
            raise late
        time.sleep(pause)  # there is no event to wait for when a server starts
        pause = min(2 * pause, 0.25)


def _open(
    factory: type[StoreMixin],
    kwargs: Mapping[str, Any],
    endpoint: tuple[str, int] | None,
    timeout: float,
) -> Connection:
    if endpoint is not None and issubclass(factory, TCPStore):
        client = SharedClient(*endpoint, timeout)
        client.host_server = is_host_server(endpoint)
        return client
    where = str(kwargs.get("file_name", factory.__name__))
    try:
        return TorchStore(open_store(factory, kwargs, endpoint), where)
    except RuntimeError as e:
        raise StoreError(f"{where} does not answer as a store: {first_line(e)}") from e


def open_store(
    factory: type[StoreMixin], kwargs: Mapping[str, Any], endpoint: tuple[str, int] | None
) -> Any:
    """Torch's own client of the store."""
    place = {} if endpoint is None else {"host_name": endpoint[0], "port": endpoint[1]}
    return factory(**{**kwargs, **place})


class IterationStore:
    """A separate store for every iteration, through which the function creates its process group.

    torch stores a group's addresses under the same names in every iteration, so two iterations must
    not share a store. Rank 0 of the iteration serves a new one in its main process, on a port
    chosen by the system; `MASTER_ADDR` and `MASTER_PORT` point to it while the function runs, so a
    plain `init_process_group()` works in every iteration and under every launcher. The store ends
    with the iteration, so nothing accumulates. Losing it with rank 0 is harmless: the iteration is
    then over. A rank that is just connecting reaches rank 0's monitor process instead, which takes
    over the port until all ranks have left (`monitor/loop.py`).

    `address` is this host's address as seen by other ranks.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.where = ""
        self._server: Any = None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the current iteration's store."""
        host, _, port = self.where.rpartition(":")
        return host, int(port)

    def serve(self) -> str:
        """Starts a server; returns its address and port."""
        self.close()
        # Multi-tenant: if the function creates another server on rank 0, it shares this one.
        self._server = TCPStore.serve(host_name=self.address, port=0, multi_tenant=True)
        self.where = f"{self.address}:{self._server.port}"
        return self.where

    def connect(self) -> Any:
        """Connects to the current store, for `State.store`."""
        if not self.where:
            raise InternalError("the iteration has no store yet")
        host, port = self.endpoint
        return TCPStore(host_name=host, port=port)

    def close(self) -> None:
        """Ends the server, if this rank serves the store."""
        self._server = None
        self.where = ""

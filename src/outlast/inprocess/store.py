"""Stores of the job; `store_factory=` takes one of these classes, or a subclass.

If the launcher hosts a store (torchrun, `outlast run`), it serves `TCPStore`; otherwise the monitor
process of rank 0 does, so that the job survives the death of rank 0's main process.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch.distributed as dist

from outlast.coordination.stores.torch_store import listening
from outlast.errors import StoreError
from outlast.inprocess.environment import master
from outlast.system.arguments import Duration, as_timedelta

__all__ = ["FileStore", "PrefixStore", "StoreMixin", "TCPStore"]

DEFAULT_TIMEOUT = datetime.timedelta(seconds=300)


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
        """Serves on the host name's address only, and on no other interface.

        Raises:
            StoreError: naming host and port, if that address cannot be bound.
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

"""A separate store for every iteration, through which the function creates its process group.

torch stores a group's addresses under the same names in every iteration, so two iterations must not
share a store. Rank 0 of the iteration serves a new one in its main process, on a port chosen by the
system; `MASTER_ADDR` and `MASTER_PORT` point to it while the function runs. Therefore a plain
`init_process_group()` works in every iteration and under every launcher. The store ends with the
iteration, so nothing accumulates over a thousand restarts. Losing it with rank 0 is harmless: the
iteration is then over. A rank that is just connecting reaches rank 0's monitor process instead,
which takes over the port until all ranks have left (`monitor/store_service.py`).
"""

from __future__ import annotations

from typing import Any

from outlast.errors import InternalError
from outlast.inprocess.store import TCPStore


class IterationStore:
    """Serves the store of each iteration, or connects to it. `address` is this host's address as
    seen by other ranks.
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

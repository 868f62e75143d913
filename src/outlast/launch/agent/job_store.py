"""The job's TCP store, hosted by the launcher: it outlives any worker.

The launcher binds the port itself and hands the listening socket to torch, for three reasons: the
store then listens on the address asked for, not on all of them; a port that is taken is told in
words; and a new attempt gets a fresh store, with none of the old keys, on the same port, which
nobody can take in between. (torchrun separates attempts by a new store, or in older versions of
torch by a prefix of keys; both come out the same for the workers.)
"""

from __future__ import annotations

import datetime
import os
import socket

import torch.distributed as dist

from outlast.coordination.stores.torch_store import TorchStore
from outlast.errors import LaunchError
from outlast.launch.agent.decisions import JobRecord

__all__ = ["JOB_KEY", "AgentStore"]

JOB_KEY = "outlast/job"
"""Where `outlast.inprocess.Wrapper` tells how its latest call stands; see `JobRecord`."""

_BACKLOG = 4096
_TIMEOUT = datetime.timedelta(seconds=300)


class AgentStore:
    """The store, its address, and what the launcher reads in it.

    Args:
        host: the address to listen on; one of this machine's.
        port: the port, or 0 for one that is free.

    Raises:
        LaunchError: if the address is not this machine's, or the port is taken.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._store = self._serve()

    def renew(self) -> None:
        """Start over with an empty store at the same address; no client may be left."""
        # The old server lets go of its copy of the socket before the new one gets its own:
        # two servers on one socket would share the workers between them.
        del self._store
        self._store = self._serve()

    def job(self) -> JobRecord:
        """How the latest call of a wrapped function stands, if there was one."""
        return JobRecord.parse(self._store.read(JOB_KEY))

    def close(self) -> None:
        """Stop serving."""
        self._listener.close()
        del self._store

    def _serve(self) -> TorchStore:
        server = dist.TCPStore(  # type: ignore[attr-defined]
            host_name=self.host,
            port=self.port,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=os.dup(self._listener.fileno()),  # the server closes it
        )
        return TorchStore(server, f"{self.host}:{self.port}")


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise LaunchError(f"--master-addr {host}: {e.strerror}") from e
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        raise LaunchError(
            f"the job's store cannot listen on {host} port {port}: {e.strerror}"
        ) from e
    return listener

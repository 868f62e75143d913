"""The job's TCP store, hosted by the launcher so that it outlives any worker.

The launcher binds the port itself and passes the listening socket to torch, for three reasons: the
store listens on the requested address only, not on all of them; a port in use gives a clear error;
and a new attempt gets an empty store on the same port, which no other process can take in between.
(torchrun separates attempts by a new store or, in older versions of torch, by a prefix of keys; the
workers see no difference.)
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket

import torch.distributed as dist

from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.stores.torch_store import TorchStore
from outlast.errors import LaunchError
from outlast.launch.agent.decisions import JobRecord

JOB_KEY = "outlast/job"
"""Where `outlast.inprocess.Wrapper` writes the state of its latest call; see `JobRecord`."""

_BACKLOG = 4096
_TIMEOUT = datetime.timedelta(seconds=300)


class JobStore:
    """The store, its address, and the record that the launcher reads from it.

    Listens on `host`, an address of this machine, and `port`, or a free port if that is 0.

    Raises:
        LaunchError: if the address is not one of this machine, or the port is in use.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._store = self._serve()

    def renew(self) -> None:
        """Replace the store by an empty one at the same address; no client may be left."""
        # The old server closes its copy of the socket before the new one gets a copy: two servers
        # on one socket would each get some of the workers.
        del self._store
        self._store = self._serve()

    def job(self) -> JobRecord:
        """The state of the latest call of a wrapped function, if there was one."""
        record = JobRecord.parse(self._store.read(JOB_KEY))
        if not record.prefix:
            return record
        stop = drive(_membership(record).stop_request(), perform_on(self._store))
        if stop is None:
            return record
        return dataclasses.replace(record, stopping=True, unsaved=not stop.done)

    def give_up(self, ranks: frozenset[int]) -> None:
        """Tell the members of the running call which ranks will not be replaced, so that they do
        not wait for them.
        """
        record = JobRecord.parse(self._store.read(JOB_KEY))
        if record.prefix:
            drive(_membership(record).give_up(ranks), perform_on(self._store))

    def last_save_s(self) -> float | None:
        """How long the save before a stop may take; `None` if the job has not begun it."""
        record = JobRecord.parse(self._store.read(JOB_KEY))
        return drive(_membership(record).last_save(), perform_on(self._store))

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


def _membership(record: JobRecord) -> MembershipProtocol:
    return MembershipProtocol(Link(record.prefix), 0)


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
        where = f"{host} port {port}"
        raise LaunchError(f"the job's store cannot listen on {where}: {e.strerror}") from e
    return listener

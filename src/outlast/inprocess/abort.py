"""Ends the distributed work that is in flight, from another thread, within milliseconds.

* NCCL groups by their own abort, all at once, each in a thread of its own, because one that is
  stuck must not hold up the others.
* gloo groups by their sockets (see `distributed/gloo_sockets.py`), sub-groups and DDP's groups too.
* A rank may also be stuck in the making of a group, where it waits on the group's store for a
  peer that will never come. So the connections to that store which this iteration has opened are
  shut down as well. Connections that were open before the wrapped call are not touched.

What a group owns is released afterwards, in the thread that used it (`distributed/release.py`).
"""

from __future__ import annotations

import abc
import logging
import os
import socket
import threading
from typing import Any

import torch
import torch.distributed as dist

from outlast.inprocess.distributed import gloo_sockets
from outlast.inprocess.distributed.gloo_blocked_waits import ForgottenWaits
from outlast.inprocess.environment import store_endpoint
from outlast.inprocess.state import State
from outlast.system.sockets import shut_down, socket_inodes

__all__ = ["Abort", "AbortTorchDistributed"]

log = logging.getLogger("outlast.inprocess")


class Abort(abc.ABC):
    """Ends in-flight work. Called in another thread than the function's."""

    def prepare(self) -> None:  # noqa: B027 - a hook that most do not need
        """Called once, before the first iteration: the time to note what is not to be touched."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Ends in-flight work; the function's thread gets an exception or goes on."""

    def again(self, state: State) -> None:  # noqa: B027 - a hook that most do not need
        """Called while the function has not been left: the time to end work that began later."""


class AbortTorchDistributed(Abort):
    """Ends the collectives of every process group that `torch.distributed` knows of."""

    def __init__(self) -> None:
        self._foreign: frozenset[int] = frozenset()
        self._forgotten = ForgottenWaits()

    def prepare(self) -> None:
        self._foreign = frozenset(socket_inodes().values())

    def __call__(self, state: State) -> State:
        threads = [
            threading.Thread(target=_abort_nccl, args=(backend,), daemon=True)
            for backend in _nccl_backends()
        ]
        for thread in threads:
            thread.start()
        self._forgotten = ForgottenWaits()
        self._shut_down()
        for thread in threads:
            thread.join()
        return state

    def again(self, state: State) -> None:
        """Shuts down what is connected by now: a group may have come up since the abort. Wakes who
        waits although nothing is connected any more.
        """
        if self._forgotten.wake(settled=not self._shut_down()):
            log.info("gloo left a thread waiting without a connection; it was woken")

    def _shut_down(self) -> bool:
        """Shuts down all connections; whether there were any between gloo's pairs."""
        pairs = [p for p in gloo_sockets.pair_sockets().items() if p[1] not in self._foreign]
        for descriptor, inode in pairs:
            shut_down(descriptor, inode)
        self._leave_store()
        return bool(pairs)

    def _leave_store(self) -> None:
        endpoint = store_endpoint()
        if endpoint is None:
            return
        for descriptor, inode in socket_inodes().items():
            if inode not in self._foreign and _peer(descriptor) == endpoint:
                shut_down(descriptor, inode)


def _nccl_backends() -> list[Any]:
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        return []
    backends = []
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue  # a group without a CUDA backend
        if hasattr(backend, "abort"):
            backends.append(backend)
    return backends


def _abort_nccl(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError:
        log.exception("an NCCL communicator could not be aborted; the restart goes on")


def _peer(descriptor: int) -> tuple[str, int] | None:
    """Address and port of the other end."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            peer = connection.getpeername()
    except OSError:
        return None  # not connected
    if not isinstance(peer, tuple):
        return None  # not of the internet
    return str(peer[0]).removeprefix("::ffff:"), int(peer[1])

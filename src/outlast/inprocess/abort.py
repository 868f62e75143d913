"""Aborts in-flight distributed work, from another thread, within milliseconds.

* NCCL groups are aborted with NCCL's abort, each in a separate thread, so that a hanging abort does
  not delay the others.
* gloo groups are aborted by shutting down their sockets (`interruption/gloo.py`), including
  subgroups and DDP's groups.
* A rank may also be blocked while creating a group, waiting on the group's store for a peer that
  will never arrive. Therefore the connections to that store that this iteration opened are shut
  down as well. Connections that were open before the wrapped call are not touched.

The groups' resources are released afterwards, in the thread that used them
(`interruption/release.py`).
"""

from __future__ import annotations

import abc
import importlib
import logging
import os
import socket
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from outlast.inprocess.environment import store_endpoint
from outlast.inprocess.interruption.gloo import GlooAbort
from outlast.inprocess.state import State
from outlast.system.sockets import shut_down, socket_inodes

__all__ = ["Abort", "AbortTorchDistributed", "AbortTransformerEngine"]

log = logging.getLogger("outlast.inprocess")

_AGAIN_S = 0.02
NCCL_THREAD = "outlast-abort-nccl"
_NCCL_S = 30.0
"""How long to wait for NCCL's abort, which waits for the GPU. torch's own limit, the timeout of the
group, does not end it: torch then waits for its thread. A thread that is still in an abort is left
behind; if the function's thread waits for the GPU too, the hard timeout ends the process.
"""


class Abort(abc.ABC):
    """Ends in-flight work. Called in the monitor thread, not in the function's thread."""

    def prepare(self) -> None:  # noqa: B027 - an optional hook
        """Called once, before the first iteration, to record what must not be touched."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Ends in-flight work; the function's thread gets an exception or continues."""

    def again(self, state: State) -> None:  # noqa: B027 - an optional hook
        """Called repeatedly until the function has been left, to end work that started later."""


class AbortTorchDistributed(Abort):
    """Ends the collectives of every process group that `torch.distributed` knows of."""

    def __init__(self) -> None:
        self._open_before: frozenset[int] = frozenset()
        self._gloo = GlooAbort()

    def prepare(self) -> None:
        self._open_before = frozenset(socket_inodes().values())

    def __call__(self, state: State) -> State:
        threads = [
            threading.Thread(target=_abort_nccl, args=(backend,), name=NCCL_THREAD, daemon=True)
            for backend in _nccl_backends()
        ]
        for thread in threads:
            thread.start()
        self._gloo = GlooAbort(keep=self._open_before)
        self._shut_down_store(self._gloo.shut_down())
        deadline = time.monotonic() + _NCCL_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            log.warning("an NCCL communicator was not aborted within %g s", _NCCL_S)
        return state

    def again(self, state: State) -> None:
        """Shuts down new connections, since a group may have been created after the abort, and
        wakes threads that still wait when no connection is left.
        """
        connected = self._gloo.shut_down()
        self._shut_down_store(connected)
        if self._gloo.wake_blocked(settled=not connected):
            log.info("woke a thread that gloo had left waiting without a connection")

    def _shut_down_store(self, of_gloo: frozenset[int]) -> None:
        """`of_gloo` are the inodes of sockets that are none of its connections."""
        endpoint = store_endpoint()
        if endpoint is None:
            return
        others = self._open_before | of_gloo
        for descriptor, inode in socket_inodes().items():
            if inode not in others and _peer(descriptor) == endpoint:
                shut_down(descriptor, inode)


class AbortTransformerEngine(Abort):
    """Destroys the communication buffers of Transformer Engine; nothing where it is not installed.

    Compose it to the left of `AbortTorchDistributed`, which ends the collectives first.
    """

    def __call__(self, state: State) -> State:
        try:
            base = importlib.import_module("transformer_engine.pytorch.module.base")
        except ImportError:
            return state
        base.destroy_ub()
        return state


def interrupt_collectives(done: threading.Event) -> None:
    """Makes every in-flight gloo collective of this process raise. Repeats until the threads in the
    collectives set `done`, since a thread may be about to open a connection or to wait on one.

    This shuts down gloo's connections, so the process groups cannot be used afterwards. NCCL
    collectives are not touched: they do not block the calling thread.
    """
    gloo = GlooAbort()
    while True:
        connected = gloo.shut_down()
        if done.wait(_AGAIN_S):
            return
        gloo.wake_blocked(settled=not connected)


def _peer(descriptor: int) -> tuple[str, int] | None:
    """The peer's address and port; `None` if the socket has no peer, or the peer has no port."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            address = connection.getpeername()
    except OSError:
        return None
    if not isinstance(address, tuple):
        return None
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


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
        log.exception("an NCCL communicator could not be aborted; the restart continues")

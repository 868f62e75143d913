"""Aborts in-flight distributed work, from another thread, within milliseconds.

* Groups with a backend for the accelerator, such as NCCL, are aborted by that, each in a separate
  thread (`interruption/communicators.py`): the interrupt does not wait for them. A communicator
  that is still being made is ended by its sockets (`interruption/nccl_bootstrap.py`).
* gloo groups are aborted by shutting down their sockets (`interruption/gloo.py`), including
  subgroups and DDP's groups.
* A rank may also be blocked while creating a group, waiting on the group's store for a peer that
  will never arrive. Therefore the connections to that store that this iteration opened are shut
  down as well; so is a connection that the function opened itself, to another store for example,
  while its thread is waiting to receive from there. Connections that were open before the wrapped
  call are not touched (for stores: `interruption/program_stores.py`).

The groups' resources are released afterwards, in the thread that used them
(`interruption/release.py`).
"""

from __future__ import annotations

import abc
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from outlast.inprocess.environment import store_endpoint
from outlast.inprocess.interruption import nccl_bootstrap
from outlast.inprocess.interruption.communicators import (
    begin_aborts,
    communicators,
    wait_for_aborts,
)
from outlast.inprocess.interruption.gloo import SETTLED_PATIENCE_S, GlooAbort
from outlast.inprocess.state import State
from outlast.system.sockets import awaited, peer, shut_down, socket_inode, socket_inodes

__all__ = ["Abort", "AbortTorchDistributed", "AbortTransformerEngine"]

log = logging.getLogger("outlast.inprocess")

_AGAIN_S = 0.02
_ENDED_S = 5.0  # less than a hard timeout; an abort may wait for the interrupt


class Abort(abc.ABC):
    """Ends in-flight work. Called in the monitor thread, not in the function's thread."""

    def prepare(self) -> None:  # noqa: B027 - an optional hook
        """Called once, before the first iteration, to record what must not be touched."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Ends in-flight work; the function's thread gets an exception or continues."""

    def again(self, state: State) -> None:  # noqa: B027 - an optional hook
        """Called repeatedly until the function has been left, to end work that started later."""


def run_all(parts: Iterable[Callable[[Any], Any]], state: Any) -> None:
    """Calls each part of an abort, also after one that has raised: that error is raised last."""
    errors: list[Exception] = []
    for part in parts:
        try:
            returned = part(state)
            state = state if returned is None else returned
        except Exception as e:  # noqa: BLE001 - raised below
            errors.append(e)
    for each in errors[1:]:
        log.error("abort raised another exception", exc_info=each)
    if errors:
        raise errors[0]


class AbortTorchDistributed(Abort):
    """Ends the collectives of every process group that `torch.distributed` knows of."""

    def __init__(self) -> None:
        self._open_before: frozenset[int] = frozenset()
        self._peers_before: frozenset[tuple[str, int] | None] = frozenset()
        self._thread = 0
        self._gloo = GlooAbort()

    def prepare(self) -> None:
        before = socket_inodes()
        self._open_before = frozenset(before.values())
        self._peers_before = frozenset(map(peer, before))
        self._thread = threading.get_native_id()

    def __call__(self, state: State) -> State:
        begin_aborts()
        self._gloo = GlooAbort(keep=self._open_before)
        self._shut_down_store(self._gloo.shut_down())
        nccl_bootstrap.end_creations(self._open_before)
        return state

    def again(self, state: State) -> None:
        """Shuts down new connections, since a group or a communicator may have been created after
        the abort, and wakes threads that still wait when no connection is left.
        """
        begin_aborts()
        nccl_bootstrap.end_creations(self._open_before)
        connected = self._gloo.shut_down()
        self._shut_down_store(connected)
        self._shut_down_awaited()
        woken = self._gloo.wake_blocked(settled=not connected)
        if self._gloo.waits and not (woken or connected):
            # Between two requests of the interrupt: a signal that wakes a thread for a moment makes
            # its wait a new one. Looked at once a request, the function's own thread, in a send,
            # would never be in the same wait twice.
            time.sleep(SETTLED_PATIENCE_S)
            woken = self._gloo.wake_blocked(settled=True)
        if woken:
            log.info("woke a thread that gloo had left waiting without a connection")

    def _shut_down_store(self, of_gloo: frozenset[int]) -> None:
        """`of_gloo` are the inodes of sockets that are none of its connections."""
        endpoint = store_endpoint()
        if endpoint is None:
            return
        others = self._open_before | of_gloo
        for descriptor, inode in socket_inodes().items():
            if inode not in others and peer(descriptor) == endpoint:
                shut_down(descriptor, inode)

    def _shut_down_awaited(self) -> None:
        """Ends a wait in C code, which an interrupt does not end, such as that for a key of a store
        which the function has opened: the connection from which its thread waits to receive, if it
        was opened since, to where none led before. This leaves out those of this package.
        """
        descriptor = awaited(self._thread)
        inode = None if descriptor is None else socket_inode(descriptor)
        if descriptor is None or inode is None or inode in self._open_before:
            return
        towards = peer(descriptor)
        if towards is not None and towards not in self._peers_before:
            shut_down(descriptor, inode)


class AbortTransformerEngine(Abort):
    """Destroys the communication buffers of Transformer Engine; nothing where it is not installed.

    Compose it to the left of `AbortTorchDistributed`, which ends the collectives first, or tries
    to for a few seconds.
    """

    def __call__(self, state: State) -> State:
        try:
            base = importlib.import_module("transformer_engine.pytorch.module.base")
        except ImportError:
            return state
        wait_for_aborts(_ENDED_S)
        base.destroy_ub()
        return state


def collectives_begun() -> list[tuple[str, int]] | None:
    """How many collectives each process group has begun on the device, by the name of the group:
    those are what an abort may end with garbage. `None` if a group does not count them.
    """
    try:
        return [(group.group_name, each.begun()) for group, each in communicators()]
    except RuntimeError:
        return None


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

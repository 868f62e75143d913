"""The host service: a thread of the agent that finds the group, joins it, and stays in it."""

from __future__ import annotations

import dataclasses
import logging
import random
import selectors
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from msgspec import structs

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.node import Node
from outlast.coordination.replicated.operations import Failed, Operation
from outlast.coordination.replicated.quorum import Configuration, Timing
from outlast.launch.config.secret import Secret
from outlast.launch.event_loop import EventLoop
from outlast.launch.hosts.host_group import GroupState
from outlast.launch.hosts.replicated.endpoints import Endpoint, Place
from outlast.launch.hosts.replicated.joining import Joining
from outlast.launch.hosts.replicated.membership import Done, Membership
from outlast.launch.hosts.replicated.messages import PROTOCOL, Hello, Message, Replicated
from outlast.launch.hosts.replicated.peer_connections import Peer, PeerConnections
from outlast.launch.hosts.replicated.record import Record
from outlast.launch.hosts.server.store_server import StoreServer
from outlast.system import lease_page
from outlast.system.error_text import describe
from outlast.system.fork import signals_of_job_blocked
from outlast.system.lease_page import LeasePage

PATIENCE_SHARE = 0.4
"""A connection is given up when the network was silent for this part of the lease."""
MAX_REFUSED = 100
LEAVE_LIMIT_S = 3.0
"""How long an orderly leave may take; after that, the others wait for the end of the lease."""

_EARLY = 16
_CLOSED = "this host has left the group"

_log = logging.getLogger(__name__)


class HostService:
    """Owns the thread. Methods may be called from any thread unless they say otherwise.

    Attributes, written by the thread:
        state: replaced as a whole, so a reader sees the old one or the new one.
        joined: whether this host is in the group.

    Args:
        me: this host; its `store_port` is filled in by the service.
        changed: called from the thread when the state has changed.
    """

    def __init__(
        self,
        run_id: str,
        me: HostInfo,
        endpoints: Sequence[Endpoint],
        place: Place,
        timing: Timing,
        page: LeasePage,
        changed: Callable[[], None],
        record: Record,
        secret: Secret | None,
    ) -> None:
        self.me = me
        self.state = GroupState()
        self.joined = False
        self._entries = 0
        self._run_id = run_id
        self._endpoints = tuple(endpoints)
        self._place, self._timing, self._page, self._changed = place, timing, page, changed
        self._record, self._secret = record, secret
        self._random = random.Random()
        self._loop: EventLoop | None = None
        self._peers: PeerConnections
        self.server: StoreServer
        self._joining: Joining | None = None
        self._membership: Membership | None = None
        self._early: deque[tuple[Peer, Message]] = deque(maxlen=_EARLY)
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # guards `_over`, and appending to `_calls` while it is false
        self._over = False
        self._left = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-hosts", daemon=True)

    # ------------------------------------------------------------------ other threads
    def start(self) -> None:
        """Start the thread; returns when it listens. Its `error` may be set by then."""
        with signals_of_job_blocked():  # either it has started, or it never does: see `close`
            self._thread.start()
        self._ready.wait()

    def problem(self) -> str:
        joining = self._joining
        return "" if joining is None else joining.problem()

    def joins_again(self) -> bool:
        """Whether it has ended because the group that has admitted it is gone: the same launcher
        may join again, as another host.
        """
        return self._membership is not None and self._membership.unheard

    def resolved(self, endpoints: Sequence[Endpoint]) -> None:
        def update() -> None:
            if self._joining is not None:
                self._joining.endpoints[:] = endpoints

        self.call(update)

    def call(self, work: Callable[[], None]) -> bool:
        with self._lock:
            if self._over or self._loop is None:
                return False
            self._calls.append(work)
        self._loop.call_from_thread(self._make_calls)
        return True

    def error(self) -> str:
        return self.state.error

    def stuck(self) -> bool:
        """Whether the lease is over although the thread should have noticed long ago."""
        return lease_page.now() > self._page.deadline + self._timing.lease

    def close(self, *, leave: bool) -> None:
        """End the service, after an orderly leave if that is wanted and possible.

        A signal may have ended `start` by an exception. Before the thread listens, it takes no
        calls: so this waits until it does.
        """
        if self._thread.ident is None:
            self._place.listener.close()
            return
        self._ready.wait()
        if leave and self.call(self._leave):
            self._left.wait(min(LEAVE_LIMIT_S, self._timing.lease / 2))
        self.call(lambda: self._end(_CLOSED))
        self._thread.join()

    # ------------------------------------------------------------------ `Upstream`, in the thread
    def submit(self, operation: Operation, done: Done) -> Hashable:
        """Start an operation. It fails before this host is admitted, when it has no workers."""
        if self._membership is not None:
            return self._membership.submit(operation, done)
        done(Failed("this host has not joined its group yet"))
        return None

    def cancel(self, handle: Hashable) -> None:
        if self._membership is not None:
            self._membership.cancel(handle)

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        try:
            self._record.begin(self.me.id)
            with EventLoop(clock=lease_page, selector=selectors.EpollSelector()) as loop:
                self._serve(loop)
        except Exception as e:  # noqa: BLE001 - reported by `error`
            self._fail(e)
        finally:
            self._ready.set()

    def _fail(self, error: Exception) -> None:
        _log.error("the host service failed", exc_info=error)
        self._end(f"its host service failed: {describe(error)}")

    def _serve(self, loop: EventLoop) -> None:
        server = self.server = StoreServer(loop, self)
        peers = PeerConnections(
            loop,
            self._hello(server.port),
            self._place.listener,
            PATIENCE_SHARE * self._timing.lease,
            self._on_message,
            self._on_host_refused,
            self._secret,
        )
        try:
            self._begin(loop, peers)
            self._ready.set()
            while not self._over:
                if self._membership is not None:
                    self._membership.pump()
                if not self._over:
                    loop.run_once()
        except Exception as e:  # noqa: BLE001 - reported by `error`
            self._fail(e)
        finally:
            server.fail(self.state.error or _CLOSED)
            peers.close()
            self._joining = None
            self._make_calls()  # those that came before the end: their operations fail

    def _begin(self, loop: EventLoop, peers: PeerConnections) -> None:
        """Look for the group; the simulation (`tests/simulation/hosts`) brings a loop and peers."""
        self._peers = peers
        with self._lock:
            self._loop = loop
        self._joining = Joining(
            loop,
            peers,
            self._endpoints,
            self._place.own,
            self.me,
            self._timing.lost_after,
            self._record,
            lambda: self._enter(self.me.id, self._record.past.generation + 1, ()),
            lambda _, admitted: self._enter(admitted.group, admitted.generation, admitted.hosts),
            self._end,
        )

    def _hello(self, store_port: int) -> Hello:
        address, port = self._place.address, self._place.port
        self.me = structs.replace(self.me, address=address, port=port, store_port=store_port)
        return Hello(PROTOCOL, self._run_id, self.me)

    def _make_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _leave(self) -> None:
        if self._membership is None:
            self._end(_CLOSED)
        else:
            self._membership.leave("it has left the group")

    def _on_message(self, peer: Peer, message: Message) -> None:
        if self._membership is not None:
            self._membership.receive(peer, message)
        elif isinstance(message, Replicated):
            # The leader has added this host, and said so to the node first.
            self._early.append((peer, message))
        elif self._joining is not None:
            self._joining.receive(peer, message)

    def _on_host_refused(self, line: str) -> None:
        refused = self.state.refused
        if line not in refused and len(refused) < MAX_REFUSED:
            self.state = dataclasses.replace(self.state, refused=(*refused, line))
            self._changed()

    def _enter(self, group: str, generation: int, known: Sequence[HostInfo]) -> None:
        assert self._loop is not None
        founding = Configuration(frozenset({self.me.id})) if group == self.me.id else None
        node = Node(self.me.id, self._timing, self._random, founding=founding)
        others = [e.address for i, e in enumerate(self._endpoints) if i != self._place.own]
        self._membership = Membership(
            self._loop,
            self._peers,
            self.me,
            node,
            group,
            generation,
            self._record,
            [address for address in others if address is not None],
            known,
            self._page,
            self._on_changed,
            self._end,
            self._on_host_refused,
        )
        for peer, message in self._early:
            self._membership.receive(peer, message)

    def _on_changed(self) -> None:
        membership = self._membership
        if membership is None:
            return  # its constructor is running
        before = self._entries, self.state, self.joined
        chain = membership.chain
        self._entries = len(chain.entries)
        self.state = dataclasses.replace(
            self.state,
            chain=chain.entries,
            leader=membership.leader,
            term=membership.term,
            asked=membership.asked,
        )
        held = self._page.valid()
        self.joined = self.joined or (held and self.me.id in chain.plan.hosts)
        if before != (self._entries, self.state, self.joined):
            self._changed()

    def _end(self, reason: str) -> None:
        """End: `reason` is empty after an orderly leave."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self.state = dataclasses.replace(self.state, error=reason or _CLOSED)
        if self._joining is not None:
            self._joining.close()
        if self._membership is not None:
            self._membership.close()
        if self._page.valid():
            # Without workers, there is no lease to keep; otherwise they must end now.
            orderly = self.state.error == _CLOSED
            self._page.renew(0.0 if orderly else lease_page.now())
        if reason:
            self._record.ended()
        else:
            self._record.remove()
        self._left.set()
        self._changed()

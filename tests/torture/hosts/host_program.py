"""A host of a store history: opens the group as an agent does, and makes random calls on its store.

python -m torture.hosts.host_program SETTINGS   # JSON of `Settings`

Its clients: threads that use the store of the agent, and a process that speaks to the host's store
server as workers do. Both use the same keys. Everything is written to one log, each event in one
write, with times of one clock for all hosts: CLOCK_MONOTONIC_RAW, which no faulty clock changes.
A call is written before it is made, so that a killed host has not hidden it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import selectors
import sys
import threading
import time
from pathlib import Path
from typing import Any

from outlast.coordination.replicated.hosts import HostLost
from outlast.coordination.stores.store import KeyTimeout, Store
from outlast.coordination.stores.tcp_client import TcpClient
from outlast.errors import LaunchError, StoreError
from outlast.launch.hosts.etcd.group import EtcdGroup
from outlast.launch.hosts.host_group import GroupSpec
from outlast.launch.hosts.replicated.group import ReplicatedGroup
from outlast.system.lease_page import LeasePage

EPOCH_S = 3.0
"""After so long, all clients use new keys, so that the history of one key stays short."""
_LOOK_S = 0.02
_WORKERS_KEYS = "w/0//"  # the namespace of the store server, and the "/" of torch's client


@dataclasses.dataclass(frozen=True)
class Settings:
    """How one host takes part."""

    name: str
    number: int  # of this start, unique in the trial
    seed: int
    backend: str
    endpoints: list[tuple[str, int]]
    lease_s: float
    record_dir: str
    log: str
    clock_offset_s: float
    pause_s: float


def true_now(offset_s: float) -> float:
    """The time of the clock that all logs use."""
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - offset_s


class Log:
    """Appends events to the log of this host. Threads may use it at once."""

    def __init__(self, settings: Settings) -> None:
        self._file = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._offset_s = settings.clock_offset_s

    def now(self) -> float:
        return true_now(self._offset_s)

    def write(self, event: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"e": event, **values}) + "\n").encode())


class Client:
    """Makes random calls, one after another."""

    def __init__(self, settings: Settings, log: Log, name: str, mix: list[str]) -> None:
        self._log, self._settings, self._mix = log, settings, mix
        self._name = f"{settings.name}.{settings.number}.{name}"
        self._r = random.Random(f"{settings.seed}/{self._name}")
        self._number = 0

    def call(self, store: Store, prefix: str, group: str, host: str) -> None:
        """Makes one call.

        Raises:
            StoreError: if its outcome is not known.
        """
        name = self._r.choice(self._mix)
        self._one(store, prefix, group, host, name, self._key(name))
        time.sleep(2 * self._settings.pause_s * self._r.random())

    def _one(self, store: Store, prefix: str, group: str, host: str, name: str, key: str) -> None:
        self._number += 1
        number = f"{self._name}.{self._number}"
        argument = str(self._r.randrange(1, 10_000)) if name == "add" else f"{number};"
        begin = self._log.now()
        called = {"n": number, "g": group, "h": host, "op": name, "k": key, "a": argument}
        self._log.write("call", **called, t=begin)
        found: object = None
        if name in ("read", "delete"):
            found = getattr(store, name)(prefix + key)
        elif name == "wait_for":
            try:
                found = store.wait_for(prefix + key, self._settings.lease_s / 4)
            except KeyTimeout:
                return  # it says nothing
        elif name == "add":
            found = store.add(prefix + key, int(argument))
        else:
            found = getattr(store, name)(prefix + key, argument.encode())
        if name in ("put", "append") and isinstance(store, TcpClient):
            # Sent without an answer. The server performs what one connection asks in order, so
            # the answer to another request is this one's too.
            store.read(prefix + key)
        result = found.decode() if isinstance(found, bytes) else found
        shown = None if result is None or name == "delete" else str(result)
        self._log.write("done", n=number, r=shown, t=self._log.now())

    def _key(self, name: str) -> str:
        epoch = int(self._log.now() / EPOCH_S)
        kinds = [kind for kind, names in _KINDS.items() if name in names]
        return f"{epoch}.{self._r.choice(kinds)}{self._r.randrange(2)}"


_KINDS = {
    "register": ("put", "read", "delete"),
    "claim": ("claim", "read", "wait_for"),
    "sum": ("add", "read"),
    "list": ("append", "read"),
}
_MIX = ["put"] * 3 + ["claim"] * 2 + ["add"] * 2 + ["append"] * 3 + ["read"] * 6
_MIX += ["delete", "wait_for", "wait_for"]
_READS = ["read"]
"""Of one client: on a host that is cut off the first write waits, and no read would be made."""


def _worker(settings: Settings, orders: int) -> None:
    """The client process: each order is a line with the group, the host and the port to use."""
    log, client = Log(settings), Client(settings, Log(settings), "w", _MIX)
    store: TcpClient | None = None
    group = host = ""
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        while True:
            if selector.select(None if store is None else 0):
                line = os.read(orders, 1 << 12)
                if not line:
                    return  # the host program has ended
                if store is not None:
                    store.close()
                group, host, address, port = line.decode().splitlines()[-1].split()
                store = TcpClient(address, int(port), 5 * settings.lease_s)
            try:
                assert store is not None
                client.call(store, "", group, host)
            except StoreError as e:
                # The port may be another group's soon. The next order names it.
                log.write("stopped", h=host, why=str(e))
                assert store is not None
                store.close()
                store = None


class _AgentsClients:
    """Threads that use the store of the agent, until the group is over."""

    def __init__(
        self, clients: list[Client], group: ReplicatedGroup | EtcdGroup, name: str
    ) -> None:
        self._over = threading.Event()
        work = [(client, group.store, name, group.me.id) for client in clients]
        self._threads = [threading.Thread(target=self._run, args=each) for each in work]
        for thread in self._threads:
            thread.start()

    def _run(self, client: Client, store: Store, group: str, host: str) -> None:
        while not self._over.is_set():
            try:
                client.call(store, _WORKERS_KEYS, group, host)
            except StoreError:
                return  # the lease is over

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def _name_of(group: ReplicatedGroup | EtcdGroup) -> str:
    if isinstance(group, EtcdGroup):
        return group._root.decode()
    membership = group._service._membership  # type: ignore[union-attr]
    assert membership is not None
    return membership.group


def _take_part(settings: Settings, log: Log, clients: list[Client], orders: int) -> None:
    """Joins a group, and stays in it until it is over for this host."""
    page = LeasePage.create(Path("/dev/shm"))  # of this host; a disk may be busy
    made = EtcdGroup if settings.backend == "etcd" else ReplicatedGroup
    group = made(
        GroupSpec(
            run_id="torture",
            endpoints=tuple((host, port) for host, port in settings.endpoints),
            lease_s=settings.lease_s,
            conf={} if settings.backend == "etcd" else {"record_dir": settings.record_dir},
            page=page,
            say=lambda line: log.write("says", line=line, t=log.now()),
        )
    )
    try:
        group.start()
    except LaunchError as e:
        log.write("refused", why=str(e), t=log.now())
        page.close()
        time.sleep(settings.lease_s / 10)
        return
    name, me = _name_of(group), group.me
    log.write("join", g=name, h=me.id, t=log.now())
    os.write(orders, f"{name} {me.id} {me.address} {me.store_port}\n".encode())
    agents = _AgentsClients(clients, group, name)
    lost: set[str] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(group.wakeup_fd(), selectors.EVENT_READ)
        while True:
            now = log.now()
            if page.valid():  # now; so also at the time before, in the same group
                log.write("acts", g=name, h=me.id, t=now)
            state = group.poll()
            for entry in state.chain:
                if isinstance(entry, HostLost) and entry.host not in lost:
                    lost.add(entry.host)
                    log.write("lost", g=name, h=entry.host, left=entry.left, t=log.now())
            if state.error:
                break
            selector.select(_LOOK_S)
    log.write("over", g=name, h=me.id, why=state.error, t=log.now())
    group.close(leave=False)
    agents.close()
    page.close()


def main() -> None:
    """Takes part in one group after another until it is killed."""
    settings = Settings(**json.loads(sys.argv[1]))
    ordered, orders = os.pipe()
    if os.fork() == 0:
        os.close(orders)
        _worker(settings, ordered)
        os._exit(0)
    os.close(ordered)
    log = Log(settings)
    log.write("start", name=settings.name, pid=os.getpid(), t=log.now())
    clients = [Client(settings, log, "a", _MIX), Client(settings, log, "r", _READS)]
    while True:
        _take_part(settings, log, clients, orders)


if __name__ == "__main__":
    main()

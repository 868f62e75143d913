"""Which hosts are in the group, as etcd's keys say: how a host founds or joins it, follows the
others, decides with them, and leaves.

    /outlast/RUN/current        the name of the group that is alive, or was the last
    /outlast/RUN/NAME/          its keys: the store (`layout`), and
        settings                what must be equal on all hosts
        h/HOST                  exists while the host is in the group, under its lease
        hc/...                  the entries of the chain, in the order of their creation
        hr/HOST                 a line about a host that another refused, under its lease

The last group of a run is alive while one of its hosts has a key. A host that finds none founds the
next group and deletes what the one before has left, in one transaction: so the first host of a job
that is started again, under the same run id, finds an empty store. A host of the group before that
wakes up later has no key any more, and can write nothing.

A host joins by one transaction, which creates its key and its entry in the chain. The entry of its
loss is written once: by the host itself when it leaves, otherwise by any other host, on the
condition that its key is absent. A key never comes back, because a restarted agent is a new host.
A decision is claimed on the condition that the chain has not grown since it was read.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable

from msgspec import structs

from outlast.coordination.replicated.hosts import HostInfo, HostJoined, HostLost
from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Refused
from outlast.coordination.stores.etcd.layout import Json
from outlast.coordination.stores.etcd.watch import Waits
from outlast.errors import LaunchError, StoreError
from outlast.launch.hosts.etcd.lease import Lease
from outlast.launch.hosts.host_group import Chain, GroupState, objection
from outlast.launch.hosts.plan import Entry

LIMIT_S = 10.0
_PAUSE_S, _RETRY_S = 0.25, 0.2
_CHAIN, _REFUSED = b"hc/", b"hr/"  # they begin with the prefix that is watched


def top_of(run_id: str) -> bytes:
    """The prefix of all keys of a run."""
    return f"/outlast/{urllib.parse.quote(run_id, safe='')}/".encode()


def host_key(root: bytes, host: str) -> bytes:
    """The key that exists while a host is in the group."""
    return layout.host_keys(root) + host.encode()


@dataclasses.dataclass(frozen=True)
class Found:
    """What etcd holds of the hosts of a group at one revision."""

    present: frozenset[str]
    chain: Chain
    refused: tuple[str, ...]
    revision: int


def _look(client: EtcdClient, root: bytes, chain: Chain, after: int = 0) -> Found:
    """Looks at the hosts, and appends to `chain` its entries above the revision `after`."""
    prefixes = [layout.host_keys(root), root + _CHAIN, root + _REFUSED]
    steps = [
        layout.get(prefix, layout.end_of(prefix), min_create_revision=str(oldest))
        for prefix, oldest in zip(prefixes, (0, after + 1, 0), strict=True)
    ]
    answer = client.repeat("/v3/kv/txn", layout.transaction([], steps, []), LIMIT_S)
    present, entries, refused = (
        sorted(layout.entries(response), key=lambda found: (found.created, found.key))
        for response in answer["responses"]
    )
    for entry in entries:
        chain.append(entry.value)
    return Found(
        frozenset(found.key[len(prefixes[0]) :].decode() for found in present),
        chain,
        tuple(found.value.decode() for found in refused),
        layout.revision_of(answer),
    )


def current_root(client: EtcdClient, run_id: str) -> bytes | None:
    """The prefix of the keys of the run's group, or of its last one."""
    top = top_of(run_id)
    found = layout.entries(
        client.repeat("/v3/kv/range", layout.range_of(top + b"current"), LIMIT_S)
    )
    return top + found[0].value + b"/" if found else None


def followed(client: EtcdClient, root: bytes) -> Found:
    """The hosts of a group now."""
    return _look(client, root, Chain())


def append(client: EtcdClient, root: bytes, found: Found, entries: Iterable[Entry]) -> None:
    """Appends entries to the chain, as no host of the group, unless that has changed since."""
    first, last = root + _CHAIN, layout.end_of(root + _CHAIN)
    name = secrets.token_hex(8)
    work = [
        layout.put(_entry_key(root, "asked", f"{name}/{number}"), entry.encode())
        for number, entry in enumerate(entries)
    ]
    same = layout.unchanged_since(first, last, found.revision)
    client.repeat("/v3/kv/txn", layout.transaction([same], work, []), LIMIT_S)


class Admission:
    """Brings one host into the group of its run.

    Args:
        lease: of this host; its key in the group is under it.
        patience_s: for how long another host may hold this host's address: the agent that ran here
            before may have been killed, and its lease not be over. It counts from the last change
            of etcd's leader, which starts the time of every lease again.
        say: prints a line, before this host waits for that lease.
    """

    def __init__(
        self,
        client: EtcdClient,
        run_id: str,
        me: HostInfo,
        lease: int,
        patience_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._client, self._me, self._say, self._said = client, me, say, False
        self._lease, self._patience_s = lease, patience_s
        self._top = top_of(run_id)
        self._current = self._top + b"current"

    def join(self, new_name: Callable[[], str]) -> bytes:
        """Joins the group, or founds one with a name from `new_name`. Returns the prefix of its
        keys. A `LaunchError` naming the host and the setting that differ. A `StoreError` if etcd
        does not answer.
        """
        began, term = 0.0, ""
        while True:
            answer = self._client.repeat("/v3/kv/range", layout.range_of(self._current), LIMIT_S)
            if answer["header"]["raft_term"] != term:
                began, term = time.monotonic(), answer["header"]["raft_term"]
            current = layout.entries(answer)
            root = b"" if not current else self._top + current[0].value + b"/"
            found = _look(self._client, root, Chain()) if root else None
            if found is not None and self._me.id in found.present:
                return root  # by a transaction whose answer was lost
            same = layout.modified(self._current, current[0].modified if current else 0)
            if found is None or not found.present:
                self._establish(same, root, self._top + new_name().encode() + b"/")
                continue
            try:
                joins = self._may_join(root, found, time.monotonic() - began < self._patience_s)
            except LaunchError as e:
                line = f"refused {self._me.name} ({self._me.address}): {e}".encode()
                refusal = layout.put(root + _REFUSED + self._me.id.encode(), line, self._lease)
                self._perform([same], [refusal])
                raise
            if joins:
                self._join(same, root)
            else:
                time.sleep(_PAUSE_S)

    def _establish(self, same: Json, old: bytes, root: bytes) -> None:
        conditions, work = [same], []
        if old:
            prefix = layout.host_keys(old)
            conditions.append(layout.created(prefix, 0, layout.end_of(prefix)))
            work.append(layout.delete(old, layout.end_of(old)))
        settings = json.dumps({"host": self._me.name, "settings": self._me.settings}).encode()
        work += [
            layout.put(self._current, root[len(self._top) : -1]),
            layout.put(root + b"settings", settings),
            *self._arrive(root),
        ]
        self._perform(conditions, work)

    def _join(self, same: Json, root: bytes) -> None:
        prefix = layout.host_keys(root)
        alive = layout.range_of(
            prefix, layout.end_of(prefix), target="CREATE", result="GREATER", create_revision="0"
        )
        absent = layout.created(host_key(root, self._me.id), 0)
        self._perform([same, alive, absent], self._arrive(root))

    def _perform(self, conditions: list[Json], work: list[Json]) -> None:
        # Whether it went through, the next look at the hosts tells.
        self._client.repeat("/v3/kv/txn", layout.transaction(conditions, work, []), LIMIT_S)

    def _arrive(self, root: bytes) -> list[Json]:
        me = structs.replace(self._me, settings={})  # all hosts read the chain at each change
        return [
            layout.put(host_key(root, me.id), b"", self._lease),
            layout.put(_entry_key(root, "joined", me.id), HostJoined(me).encode()),
        ]

    def _may_join(self, root: bytes, found: Found, patient: bool) -> bool:
        """Whether this host fits to the group; False to look again later."""
        answer = self._client.repeat("/v3/kv/range", layout.range_of(root + b"settings"), LIMIT_S)
        held = layout.entries(answer)
        if not held:
            return False  # deleted meanwhile, with the whole group
        settings = json.loads(held[0].value)
        present = [host for host in found.chain.plan.hosts.values() if host.id in found.present]
        first = structs.replace(present[0], name=settings["host"], settings=settings["settings"])
        # Nor may the others be out of this one's reach.
        no = objection(self._me, first, present, 0.0) or objection(first, self._me, (), 0.0)
        if no is not None and not (no.limit_s and patient):
            raise LaunchError(no.reason)
        if no is not None and not self._said:
            self._said = True
            self._say(
                f"another agent at {self._me.address} is in this run: if it has ended, this one is "
                f"admitted when its lease in etcd is over, within {self._patience_s:g} s after the "
                "last change of etcd's leader"
            )
        return no is None


def leave(client: EtcdClient, run_id: str, root: bytes, me: HostInfo, limit: float) -> None:
    """Takes this host out of the group; the last host to leave deletes all keys of the run."""
    key, prefix, top = host_key(root, me.id), layout.host_keys(root), top_of(run_id)
    alone = [
        layout.created(prefix, 0, key),
        layout.created(key + b"\0", 0, layout.end_of(prefix)),
        layout.present(key),
    ]
    left = HostLost(me.id, "it has left", left=True).encode()
    gone = [layout.delete(key), layout.put(_entry_key(root, "lost", me.id), left)]
    otherwise = layout.transaction([layout.present(key)], gone, [])
    body = layout.transaction(
        alone, [layout.delete(top, layout.end_of(top))], [{"request_txn": otherwise}]
    )
    client.repeat("/v3/kv/txn", body, limit)


def _entry_key(root: bytes, kind: str, name: str) -> bytes:
    return root + _CHAIN + f"{kind}/{name}".encode()


class Membership:
    """Follows the hosts of a group in a thread, and records those that are lost.

    `on_change` is called in that thread.
    """

    def __init__(
        self, client: EtcdClient, root: bytes, me: str, lease: Lease, on_change: Callable[[], None]
    ) -> None:
        self._client, self._root, self._me = client, root, me
        self._lease, self._on_change = lease, on_change
        self._watched = layout.host_keys(root)[:-1]
        self._waits = Waits(client, self._watched, deletes=True)
        self._chain = Chain()
        self._found = Found(frozenset(), self._chain, (), 0)
        self._looking = threading.Lock()  # so that what was found only grows
        self._refused: dict[str, None] = {}  # all that were ever seen, in order
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast etcd hosts", daemon=True)

    def start(self) -> None:
        """Reads the hosts, and begins to follow them. Raises a `StoreError` if that fails."""
        self._refresh()
        self._thread.start()

    def state(self) -> GroupState:
        plan = self._chain.plan
        return GroupState(
            chain=self._chain.entries,
            # The host that has been here longest. Its loss is in the chain, so the term has grown
            # when another host follows.
            leader=next(iter(plan.hosts), ""),
            term=1 + len(plan.lost),
            error=self._lease.error,
            refused=tuple(self._refused),
        )

    def claim(self, number: int, entry: Entry) -> Entry:
        key = _entry_key(self._root, "decided", str(number))
        entries = self._root + _CHAIN
        while len(self._chain.entries) < number:
            found = self._found
            conditions = [
                layout.unchanged_since(entries, layout.end_of(entries), found.revision),
                layout.present(host_key(self._root, self._me)),
            ]
            # A copy that is sent again, or comes late, finds the chain changed by the first one.
            body = layout.transaction(conditions, [layout.put(key, entry.encode())], [])
            try:
                if len(self._chain.entries) == number - 1:
                    self._client.repeat("/v3/kv/txn", body, LIMIT_S)
                self._refresh()
            except Refused as e:
                raise StoreError(f"etcd refused a decision: {e}") from e
            self._lease.check()
        return self._chain.entries[number - 1]

    def close(self) -> None:
        self._end.set()
        self._waits.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        start, end = self._watched, layout.end_of(self._watched)
        while not self._end.is_set() and self._lease.ok:
            try:
                self._waits.wait(start, end, self._found.revision, None)
                if not self._end.is_set():
                    self._refresh()
            except (StoreError, Refused):
                # etcd does not answer: the lease decides for how long this host may go on.
                self._end.wait(_RETRY_S)

    def _refresh(self) -> None:
        with self._looking:
            found = _look(self._client, self._root, self._chain, self._found.revision)
            missing = [host for host in self._chain.plan.hosts if host not in found.present]
            for host in missing:
                self._record_loss(host)
            if missing:
                found = _look(self._client, self._root, self._chain, found.revision)
            self._found = found
            self._refused |= dict.fromkeys(found.refused)
        self._on_change()

    def _record_loss(self, host: str) -> None:
        # Sent again if the answer is lost: the second condition lets it through once.
        reason = (
            f"its lease has expired: etcd had no sign of life from it for {self._lease.ttl_s} s"
        )
        key = _entry_key(self._root, "lost", host)
        conditions = [
            layout.created(host_key(self._root, host), 0),
            layout.created(key, 0),
            layout.present(host_key(self._root, self._me)),
        ]
        write = layout.put(key, HostLost(host, reason).encode())
        body = layout.transaction(conditions, [write], [])
        self._client.repeat("/v3/kv/txn", body, LIMIT_S)

"""Which hosts are in the group, as etcd's keys say.

A host is in the group while its key exists; the key is under its lease. Two logs in the store say
in what order hosts came and went:

    hosts/joined   one line for each host, written by the transaction that creates its key
    hosts/lost     one line for each host whose key is gone, written once: by the host itself when
                   it leaves, otherwise by any other host, on the condition that the key is absent

A host that another refuses leaves a line about it beside the keys of the hosts, for the others to
print; it vanishes with the lease of the refused host.

A key never comes back, because a restarted agent is a new host. So all hosts read the same logs,
and a host that is in `hosts/lost` cannot write any more (`coordination/stores/etcd/operations.py`).
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Refused
from outlast.coordination.stores.etcd.layout import Entry, Json
from outlast.coordination.stores.etcd.watch import Waits
from outlast.errors import StoreError
from outlast.launch.hosts.etcd.lease import Lease
from outlast.launch.hosts.host_group import GroupState, LostHost

JOINED, LOST = "hosts/joined", "hosts/lost"
_REFUSED = b"hr/"  # begins with the prefix that is watched
_RETRY_S = 0.2
LIMIT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Hosts:
    """What etcd holds of the hosts of a group at one revision."""

    present: frozenset[str]
    joined: tuple[HostInfo, ...]
    lost: tuple[LostHost, ...]
    refused: tuple[str, ...]
    revision: int

    @property
    def live(self) -> tuple[HostInfo, ...]:
        """The hosts that are not in the log of the lost, in the order in which they joined."""
        gone = {lost.host.id for lost in self.lost}
        return tuple(host for host in self.joined if host.id not in gone)


def host_key(root: bytes, host: str) -> bytes:
    """The key that exists while a host is in the group."""
    return layout.host_keys(root) + host.encode()


def refusal_key(root: bytes, host: str) -> bytes:
    """The key of the line about a host that was refused."""
    return root + _REFUSED + host.encode()


def log_entry(root: bytes, log: str, host: str) -> bytes:
    """The key of a host's line in one of the two logs: an entry of `append`."""
    return layout.base_key(root, log) + layout.APPENDED + host.encode()


def lost_line(host: str, reason: str, *, left: bool) -> bytes:
    """The line of a host in the log of the lost."""
    return json.dumps({"id": host, "reason": reason, "orderly": left}).encode() + b"\n"


def steps(root: bytes) -> list[Json]:
    """The steps of a transaction that read the hosts; `hosts_in` reads the answer."""
    prefix = layout.host_keys(root)
    logs = [layout.base_key(root, log) for log in (JOINED, LOST)]
    return [
        layout.get(prefix, layout.end_of(prefix), keys_only=True),
        *(layout.get(log, layout.end_of(log)) for log in logs),
        layout.get(root + _REFUSED, layout.end_of(root + _REFUSED)),
    ]


def hosts_in(root: bytes, responses: list[Json], revision: int) -> Hosts:
    """The hosts in the answers to `steps`."""
    present, joined, lost, refused = (layout.entries(response) for response in responses)
    cut = len(layout.host_keys(root))
    infos = [HostInfo.decode(entry.value) for entry in _ordered(joined)]
    hosts = {info.id: info for info in infos}
    gone = []
    for said in (json.loads(entry.value) for entry in _ordered(lost)):
        host = hosts[said["id"]]
        gone.append(LostHost(host=host, reason=said["reason"], left=said["orderly"]))
    return Hosts(
        frozenset(entry.key[cut:].decode() for entry in present),
        tuple(hosts.values()),
        tuple(gone),
        tuple(entry.value.decode() for entry in _ordered(refused)),
        revision,
    )


def _ordered(found: list[Entry]) -> list[Entry]:
    return sorted(found, key=lambda entry: (entry.created, entry.key))


class Membership:
    """Follows the hosts of a group in a thread, and records those that are lost.

    `on_change` is called in that thread.
    """

    def __init__(
        self,
        client: EtcdClient,
        root: bytes,
        me: str,
        lease: Lease,
        on_change: Callable[[], None],
    ) -> None:
        self._client, self._root, self._me = client, root, me
        self._lease, self._on_change = lease, on_change
        self._watched = layout.host_keys(root)[:-1]
        self._waits = Waits(client, self._watched, deletes=True)
        self._hosts = Hosts(frozenset(), (), (), (), 0)
        self._refused: dict[str, None] = {}  # all that were ever seen, in order
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast etcd hosts", daemon=True)

    def start(self) -> None:
        """Reads the hosts, and begins to follow them. Raises a `StoreError` if that fails."""
        self._refresh()
        self._thread.start()

    def state(self) -> GroupState:
        """The hosts as this host last read them."""
        hosts = self._hosts
        live = hosts.live
        return GroupState(
            hosts=live,
            lost=hosts.lost,
            # The host that has been here longest. Its loss is in the log, so the term has grown
            # when another host follows.
            leader=live[0].id if live else "",
            term=1 + len(hosts.lost),
            error=self._lease.error,
            refused=tuple(self._refused),
        )

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._waits.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        start, end = self._watched, layout.end_of(self._watched)
        while not self._end.is_set() and self._lease.ok:
            try:
                self._waits.wait(start, end, self._hosts.revision, None)
                if not self._end.is_set():
                    self._refresh()
            except (StoreError, Refused):
                # etcd does not answer: the lease decides for how long this host may go on.
                self._end.wait(_RETRY_S)

    def _refresh(self) -> None:
        hosts = self._read()
        gone = {lost.host.id for lost in hosts.lost}
        missing = [h.id for h in hosts.joined if h.id not in hosts.present and h.id not in gone]
        for host in missing:
            self._record_loss(host)
        if missing:
            hosts = self._read()
        self._hosts = hosts
        self._refused |= dict.fromkeys(hosts.refused)
        self._on_change()

    def _read(self) -> Hosts:
        body = layout.transaction([], steps(self._root), [])
        answer = self._client.repeat("/v3/kv/txn", body, LIMIT_S)
        return hosts_in(self._root, answer["responses"], layout.revision_of(answer))

    def _record_loss(self, host: str) -> None:
        # Sent again if the answer is lost: the second condition lets it through once.
        reason = (
            f"its lease has expired: etcd had no sign of life from it for {self._lease.ttl_s} s"
        )
        line = log_entry(self._root, LOST, host)
        conditions = [
            layout.created(host_key(self._root, host), 0),
            layout.created(line, 0),
            layout.present(host_key(self._root, self._me)),
        ]
        write = layout.put(line, lost_line(host, reason, left=False))
        body = layout.transaction(conditions, [write], [])
        self._client.repeat("/v3/kv/txn", body, LIMIT_S)

"""How a host founds a group in etcd, or joins one that exists; and how it leaves.

    /outlast/<run id>/current      the name of the group that is alive, or was the last
    /outlast/<run id>/<name>/...   its keys

The last group of a run is alive while one of its hosts has a key. A host that finds none founds the
next group and deletes what the one before has left, in one transaction: so the first host of a job
that is started again, under the same run id, finds an empty store. A host of the group before that
wakes up later has no key any more, and can write nothing.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Callable

from msgspec import structs

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.layout import Json
from outlast.errors import LaunchError
from outlast.launch.hosts.etcd import membership
from outlast.launch.hosts.etcd.membership import Hosts
from outlast.launch.hosts.replicated.admission import objection
from outlast.launch.hosts.replicated.messages import Refused

LIMIT_S = 10.0
_PAUSE_S = 0.25


def top_of(run_id: str) -> bytes:
    """The prefix of all keys of a run."""
    return f"/outlast/{urllib.parse.quote(run_id, safe='')}/".encode()


class Admission:
    """Brings one host into the group of its run.

    Args:
        lease: of this host; its key in the group is under it.
        patience_s: for how long another host may hold this host's address: the agent that ran here
            before may have been killed, and its lease not be over.
    """

    def __init__(
        self,
        client: EtcdClient,
        run_id: str,
        me: HostInfo,
        lease: int,
        patience_s: float,
    ) -> None:
        self._client, self._me = client, me
        self._lease, self._patience_s = lease, patience_s
        self._top = top_of(run_id)
        self._current = self._top + b"current"

    def join(self, new_name: Callable[[], str]) -> bytes:
        """Joins the group, or founds one with a name from `new_name`. Returns the prefix of its
        keys.

        Raises:
            LaunchError: naming the host and the setting that differ.
            StoreError: if etcd does not answer.
        """
        began = time.monotonic()
        while True:
            answer = self._client.repeat("/v3/kv/range", layout.range_of(self._current), LIMIT_S)
            found = layout.entries(answer)
            root = b"" if not found else self._top + found[0].value + b"/"
            hosts = self._hosts(root) if root else None
            if hosts is not None and self._me.id in hosts.present:
                return root  # by a transaction whose answer was lost
            same = layout.modified(self._current, found[0].modified if found else 0)
            if hosts is None or not hosts.present:
                self._found([same], root, self._top + new_name().encode() + b"/")
                continue
            try:
                joins = self._may_join(root, hosts, time.monotonic() - began < self._patience_s)
            except LaunchError as e:
                line = f"refused {self._me.name} ({self._me.address}): {e}".encode()
                key = membership.refusal_key(root, self._me.id)
                self._perform([same], [layout.put(key, line, self._lease)])
                raise
            if joins:
                self._join([same], root)
            else:
                time.sleep(_PAUSE_S)

    def _hosts(self, root: bytes) -> Hosts:
        body = layout.transaction([], membership.steps(root), [])
        answer = self._client.repeat("/v3/kv/txn", body, LIMIT_S)
        return membership.hosts_in(root, answer["responses"], layout.revision_of(answer))

    def _found(self, conditions: list[Json], old: bytes, root: bytes) -> None:
        if old:
            prefix = layout.host_keys(old)
            conditions = [*conditions, layout.created(prefix, 0, layout.end_of(prefix))]
        said = {"host": self._me.name, "settings": self._me.settings}
        name = root[len(self._top) : -1]
        work = [
            *([layout.delete(old, layout.end_of(old))] if old else []),
            layout.put(self._current, name),
            layout.put(root + b"settings", json.dumps(said).encode()),
            *self._arrive(root),
        ]
        self._perform(conditions, work)

    def _join(self, conditions: list[Json], root: bytes) -> None:
        prefix = layout.host_keys(root)
        alive = layout.range_of(
            prefix, layout.end_of(prefix), target="CREATE", result="GREATER", create_revision="0"
        )
        absent = layout.created(membership.host_key(root, self._me.id), 0)
        self._perform([*conditions, alive, absent], self._arrive(root))

    def _perform(self, conditions: list[Json], work: list[Json]) -> None:
        # Whether it went through, the next look at the hosts tells.
        self._client.repeat("/v3/kv/txn", layout.transaction(conditions, work, []), LIMIT_S)

    def _arrive(self, root: bytes) -> list[Json]:
        me = structs.replace(self._me, settings={})  # all hosts read the log at each change
        return [
            layout.put(membership.host_key(root, me.id), b"", self._lease),
            layout.put(
                membership.log_entry(root, membership.JOINED, me.id), f"{me.encode()}\n".encode()
            ),
        ]

    def _may_join(self, root: bytes, hosts: Hosts, patient: bool) -> bool:
        """Whether this host fits to the group; False to look again later."""
        answer = self._client.repeat("/v3/kv/range", layout.range_of(root + b"settings"), LIMIT_S)
        found = layout.entries(answer)
        if not found:
            return False  # deleted meanwhile, with the whole group
        said = json.loads(found[0].value)
        present = [host for host in hosts.joined if host.id in hosts.present]
        first = structs.replace(present[0], name=said["host"], settings=said["settings"])
        # Nor may the others be out of this one's reach.
        no = objection(self._me, first, present, 0.0) or objection(first, self._me, (), 0.0)
        if no is not None and (isinstance(no, Refused) or not patient):
            raise LaunchError(no.reason)
        return no is None


def leave(client: EtcdClient, run_id: str, root: bytes, me: HostInfo, limit: float) -> None:
    """Takes this host out of the group; the last host to leave deletes all keys of the run."""
    key = membership.host_key(root, me.id)
    prefix = layout.host_keys(root)
    line = membership.lost_line(me.id, "it has left", left=True)
    top = top_of(run_id)
    alone = [
        layout.created(prefix, 0, key),
        layout.created(key + b"\0", 0, layout.end_of(prefix)),
        layout.present(key),
    ]
    gone = [
        layout.delete(key),
        layout.put(membership.log_entry(root, membership.LOST, me.id), line),
    ]
    otherwise = layout.transaction([layout.present(key)], gone, [])
    body = layout.transaction(
        alone, [layout.delete(top, layout.end_of(top))], [{"request_txn": otherwise}]
    )
    client.repeat("/v3/kv/txn", body, limit)

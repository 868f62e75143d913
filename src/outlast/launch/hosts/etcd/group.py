"""The host group over etcd v3: `--rdzv-backend etcd`.

The hosts need no connections among each other: etcd holds the store, the leases and the chain. Each
agent runs a store server for the workers of its host, whose operations it performs on etcd under
its own lease.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import (
    Endpoint,
    Refused,
    Security,
    diagnose,
    explain,
    known_fault,
)
from outlast.coordination.stores.etcd.operations import NOT_FOUND, Fence
from outlast.coordination.stores.etcd.store import EtcdStore
from outlast.errors import LaunchError, StoreError
from outlast.launch.environment import etcd_password
from outlast.launch.hosts.etcd.lease import Lease
from outlast.launch.hosts.etcd.membership import Admission, Membership, host_key, leave
from outlast.launch.hosts.etcd.serving import ServerThread
from outlast.launch.hosts.host_group import GroupSpec, GroupState
from outlast.launch.hosts.plan import Entry
from outlast.launch.hosts.replicated.endpoints import facing, own_address, resolve
from outlast.launch.hosts.server.loop_store import LoopStore, wait_for_call

_LEAVE_S = 2.0


class EtcdGroup:
    """A `HostGroup` over etcd; `start` connects."""

    def __init__(self, spec: GroupSpec) -> None:
        self._spec, self._security = spec, security_of(spec.conf)
        self._endpoints = [Endpoint(*endpoint) for endpoint in spec.endpoints]
        self._cleanup = contextlib.ExitStack()
        self._changed = -1
        self._me: HostInfo | None = None
        self._root = b""
        self._store: EtcdStore | None = None
        self._server: ServerThread | None = None
        self._closed = False

    @property
    def me(self) -> HostInfo:
        if self._me is None:
            raise ValueError("the group has not been started")
        return self._me

    @property
    def store(self) -> EtcdStore:
        if self._store is None:
            raise ValueError("the group has not been started")
        return self._store

    @property
    def workers(self) -> LoopStore:
        assert self._server is not None
        where = f"run {self._spec.run_id!r}"
        return LoopStore(self, self._server.server, where, self._spec.lease_s)

    def call(self, work: Callable[[], None]) -> bool:
        return self._server is not None and self._server.call(work)

    def error(self) -> str:
        return self._lease.error

    def stuck(self) -> bool:
        return self._closed or not self._lease.ok

    def start(self) -> None:
        deadline = time.monotonic() + self._spec.join_limit_s
        while not self._joins(deadline):  # with another lease
            time.sleep(0.1)

    def _joins(self, deadline: float) -> bool:
        with contextlib.ExitStack() as stack:
            self._changed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            stack.callback(self._close_wakeup)
            try:
                self._client = EtcdClient(self._endpoints, self._security)
                stack.callback(self._client.close)
                self._await_etcd()
                self._start(stack)
            except Refused as e:
                if e.code == NOT_FOUND and time.monotonic() < deadline:
                    return False
                why = explain(e, self._security) or f"etcd refused a request: {e}"
                raise LaunchError(f"--rdzv-endpoint {self._client.where}: {why}") from e
            except StoreError as e:  # etcd does not answer, and the host may be in the group
                if time.monotonic() < deadline:
                    self._spec.say(f"{e}; this host tries again")
                    return False
                raise LaunchError(str(e)) from e
            self._cleanup = stack.pop_all()
        return True

    def _start(self, stack: contextlib.ExitStack) -> None:
        spec = self._spec
        attempt_s = max(0.1, spec.lease_s / 5)
        renewing = EtcdClient(self._endpoints, self._security, attempt_s)
        self._lease = lease = Lease(renewing, spec.lease_s, spec.page, self._lease_ended)
        stack.callback(lease.close)
        lease.grant(min(spec.lease_s, spec.join_limit_s))
        found = [resolve(*endpoint) for endpoint in spec.endpoints]
        address = facing(found) if spec.local_addr is None else own_address(spec.local_addr)
        self._server = server = ServerThread(lambda: self.store)
        stack.callback(server.close)
        self._me = me = spec.host(address, server.port)
        patience_s = 2.0 * lease.ttl_s + 2.0  # etcd looks for expired leases now and then
        joining = Admission(self._client, spec.run_id, me, lease.id, patience_s, spec.say)
        self._root = root = joining.join(lambda: secrets.token_hex(4))
        lease.key = host_key(root, me.id)
        fence = Fence(lease.key, lease.id)
        limit_s = max(30.0, 2 * spec.lease_s)
        self._store = EtcdStore(
            self._client, root.decode(), me.id, fence, limit_s=limit_s, check=lease.check
        )
        stack.callback(self._store.close)
        self._membership = Membership(self._client, root, me.id, lease, self._wake)
        stack.callback(self._membership.close)
        self._membership.start()

    def wakeup_fd(self) -> int:
        return self._changed

    def poll(self) -> GroupState:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._changed)
        return self._membership.state()

    def claim(self, number: int, entry: Entry) -> Entry:
        return self._membership.claim(number, entry)

    def new_attempt(self, attempt: int) -> None:
        assert self._server is not None
        server = self._server.server
        wait_for_call(self, lambda: server.new_attempt(attempt))

    def close(self, *, leave: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if leave and self._me is not None and self._lease.ok:
            self._leave(self._me)
        self._cleanup.close()

    def _leave(self, me: HostInfo) -> None:
        limit = min(_LEAVE_S, self._spec.lease_s / 2)
        with contextlib.suppress(StoreError, Refused):
            leave(self._client, self._spec.run_id, self._root, me, limit)
            self._client.repeat("/v3/lease/revoke", {"ID": str(self._lease.id)}, limit)
        # Otherwise the others learn of it when the lease expires.

    def _lease_ended(self) -> None:
        if self._store is not None:
            self._store.waits.wake_all()  # they read again, which fails
        if self._server is not None:
            self._server.fail(self._lease.error)
        self._wake()

    def _wake(self) -> None:
        if self._changed >= 0:
            os.eventfd_write(self._changed, 1)

    def _close_wakeup(self) -> None:
        descriptor, self._changed = self._changed, -1
        os.close(descriptor)

    # ------------------------------------------------------------------------------- start

    def _await_etcd(self) -> None:
        """Returns when etcd answers; a `LaunchError` if it does not, or not as needed."""
        deadline = time.monotonic() + self._spec.join_limit_s
        while True:
            limit_s = min(5.0, self._spec.join_limit_s)
            problems = [diagnose(each, self._security, limit_s) for each in self._endpoints]
            if not all(problems):
                break  # one good endpoint is enough: the others may be members that are down
            waits = all("nothing answers" in problem for problem in problems)
            if not waits or time.monotonic() >= deadline:
                limit = f" for {self._spec.join_limit_s:g} s" if waits else ""
                raise LaunchError(f"--rdzv-endpoint: {'; '.join(problems)}{limit}")
            time.sleep(0.5)
        for each, problem in zip(self._endpoints, problems, strict=True):
            if not problem and (fault := known_fault(each, self._security, limit_s)):
                self._spec.say(fault)
                break
        self._client.repeat(
            "/v3/kv/range",
            {"key": layout.text(b"/outlast/"), "count_only": True},
            max(1.0, deadline - time.monotonic()),
        )


def security_of(conf: Mapping[str, str]) -> Security:
    """How to connect, from the settings of `--rdzv-conf` and the environment. A `LaunchError` names
    the setting that is wrong.
    """
    if "password" in conf:
        raise LaunchError(
            "--rdzv-conf password: other users could read it from the command line; use the "
            "environment variable OUTLAST_ETCD_PASSWORD, or a file, by password_file=FILE"
        )
    protocol = conf.get("protocol", "")
    if protocol not in ("", "http", "https"):
        raise LaunchError(f"--rdzv-conf protocol={protocol}: expected http or https")
    if bool(conf.get("cert")) != bool(conf.get("key")):
        raise LaunchError("--rdzv-conf: cert and key are only of use together")
    if protocol == "http" and (conf.get("cacert") or conf.get("cert")):
        raise LaunchError("--rdzv-conf protocol=http conflicts with cacert and cert, for TLS")
    password = etcd_password()
    if file := conf.get("password_file", ""):
        try:
            password = Path(file).read_text().strip()
        except OSError as e:
            raise LaunchError(f"--rdzv-conf password_file={file}: {e.strerror}") from e
    user = conf.get("user", "")
    if user and not password:
        raise LaunchError(
            f"--rdzv-conf user={user}: no password; set the environment variable "
            "OUTLAST_ETCD_PASSWORD, or name a file that holds it by password_file=FILE"
        )
    return Security(
        cacert=conf.get("cacert", ""),
        cert=conf.get("cert", ""),
        key=conf.get("key", ""),
        user=user,
        password=password,
        tls=protocol == "https",
    )

"""The lease of this host in etcd, renewed by a thread.

etcd counts the time of a lease from when it has received the last renewal, and deletes the keys of
the host when the time is over. This host counts from when it has sent that renewal, and a shorter
time (`MARGIN`): so its workers have been killed before any other host can see its end, even if the
clocks of this host and of etcd's leader do not run equally fast. A new leader of etcd starts the
time of every lease again, which only makes it longer.

Not every answer to a renewal is one. A leader whose disk stalls does not learn that another was
elected, and goes on renewing leases that the other lets expire (etcd-io/etcd 15247). So a renewal
counts only when a linearizable read that follows it has found this host's key, and when that read,
the renewal, and the read before it were answered by one member in one term:

- The read was answered in that term, so no other leader had been elected when it was.
- A member's term never goes back. So the member was in it when it passed the renewal on, to the
  only leader that the term has, and a later leader starts the time again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Refused
from outlast.coordination.stores.etcd.layout import Json
from outlast.coordination.stores.etcd.operations import NOT_FOUND, NoAnswer
from outlast.errors import StoreError
from outlast.system.lease_page import LeasePage, now

MARGIN = 0.2
_RENEWALS = 4
"""How many times a lease is renewed in its time."""


class Lease:
    """The lease of this host. `on_end` is called once, in the thread, when it is over.

    Args:
        client: for this lease alone, so that nothing else delays a renewal.
        lease_s: how long this host may act after a renewal was sent.
        page: where other processes of this host see the deadline.
    """

    def __init__(
        self, client: EtcdClient, lease_s: float, page: LeasePage, on_end: Callable[[], None]
    ) -> None:
        self._client, self._lease_s, self._page, self._on_end = client, lease_s, page, on_end
        self.ttl_s = max(1, math.ceil(lease_s * (1 + MARGIN)))
        self.id = 0
        self.key = b""  # exists while this host is in the group; empty before that
        self._answered: tuple[str, str] | None = None  # who has answered the last read
        self._error = ""
        self._deadline = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast etcd lease", daemon=True)

    def grant(self, limit: float) -> None:
        """Gets the lease. Raises a `StoreError` without an answer within `limit`, or `Refused`."""
        # Repeated if an answer is lost: a lease that nobody knows of ends by itself.
        sent = now()
        answer = self._client.repeat("/v3/lease/grant", {"TTL": str(self.ttl_s)}, limit)
        self.id = int(answer["ID"])
        self.ttl_s = int(answer["TTL"])  # etcd may have a minimum
        if not self._extend(sent):
            raise StoreError(f"etcd at {self._client.where} took too long to grant a lease")
        self._thread.start()

    @property
    def ok(self) -> bool:
        """Whether this host may act. Once false, it never becomes true again."""
        return not self._error and now() < self._deadline

    @property
    def error(self) -> str:
        """Why this host may not act any more; empty while it may."""
        return "" if self.ok else self._error or self._expired()

    def check(self) -> None:
        if error := self.error:
            raise StoreError(error)

    def close(self) -> None:
        """Stops the renewals; the lease ends by itself, or by `revoke`."""
        self._end.set()
        self._client.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _expired(self) -> str:
        return (
            f"the lease of this host is over: it could not be renewed for {self._lease_s:g} s at "
            f"etcd {self._client.where}"
        )

    def _extend(self, sent: float) -> bool:
        # A renewal that is answered too late does not revive the lease: the workers may have been
        # killed by then.
        if self._deadline and now() >= self._deadline:
            return False
        self._deadline = sent + self._lease_s
        self._page.renew(self._deadline)
        return now() < self._deadline

    def _run(self) -> None:
        pause = self._lease_s / _RENEWALS
        problem = ""
        while not self._end.wait(pause):
            sent = now()
            if sent >= self._deadline:
                self._ended(self._expired() + problem)
                return
            try:
                counts = self._renew(self._deadline - sent)
            except (NoAnswer, Refused) as e:
                if isinstance(e, Refused) and e.code == NOT_FOUND:
                    self._ended("the lease of this host is over: it has expired in etcd")
                    return
                problem, counts = f" (last: {e})", False
            if counts and not self._extend(sent):
                self._ended(self._expired() + problem)
                return
            pause = self._lease_s / _RENEWALS if counts else min(0.05, self._lease_s / 20)

    def _renew(self, limit: float) -> bool:
        """Whether a renewal counts, see the module; a `Refused` if the lease is over in etcd."""
        body = {"ID": str(self.id)}
        renewed = self._client.call("/v3/lease/keepalive", body, limit).get("result", {})
        if int(renewed.get("TTL", 0)) <= 0:
            raise Refused(NOT_FOUND, "the lease has expired")
        key = self.key
        read = self._client.call("/v3/kv/range", layout.range_of(key or b"/outlast/"), limit)
        if key and not layout.entries(read):
            raise Refused(NOT_FOUND, "the key of this host is gone")
        before, self._answered = self._answered, _answered(read)
        return before == _answered(renewed) == self._answered

    def _ended(self, why: str) -> None:
        if self._end.is_set():
            return  # closed: the end of the client is no fault
        self._error = why
        self._on_end()


def _answered(answer: Json) -> tuple[str, str]:
    """The member that has answered, and its term; a `NoAnswer` if what answers is not etcd."""
    try:
        return answer["header"]["member_id"], answer["header"]["raft_term"]
    except KeyError as e:
        raise NoAnswer(f"an answer without {e}") from e

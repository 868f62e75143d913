"""Requests to a cluster of etcd: endpoints in turn, kept connections, and the user's token."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Sequence

from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.connection import (
    Connection,
    Endpoint,
    Json,
    Refused,
    Security,
    Stream,
    connect,
)
from outlast.coordination.stores.etcd.operations import NoAnswer
from outlast.errors import StoreError

ATTEMPT_S = 2.0
"""How long a member may take to answer before the next one is asked. A member that is stopped
accepts connections, and answers none.
"""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5

# gRPC's codes of answers after which the same request may succeed, at this member or another.
# Not of etcd; canceled, unknown, deadline exceeded, aborted, internal, unavailable.
_PASSING = frozenset({-1, 1, 2, 4, 10, 13, 14})
_INVALID, _EXHAUSTED, _UNAUTHENTICATED = 3, 8, 16
_LOST = (OSError, http.client.HTTPException)


class EtcdClient:
    """Sends requests to one member at a time, to the next after a failure. Threads may share it. A
    `StoreError` if a certificate or key cannot be read. `attempt_s`: how long one member may take
    to answer, in seconds.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], security: Security, attempt_s: float = ATTEMPT_S
    ) -> None:
        if not endpoints:
            raise ValueError("endpoints: at least one is needed")
        self.endpoints = tuple(endpoints)
        self.attempt_s, self._security = attempt_s, security
        try:
            self._tls = security.context()
        except OSError as e:
            files = ", ".join(filter(None, (security.cacert, security.cert, security.key)))
            raise StoreError(f"the certificates for etcd cannot be loaded ({files}): {e}") from e
        self._lock = threading.Lock()
        self._current = 0
        self._idle: dict[int, list[Connection]] = {}
        self._token = ""
        self._closed = False

    @property
    def where(self) -> str:
        return ",".join(map(str, self.endpoints))

    def call(self, path: str, body: Json, limit: float | None = None) -> Json:
        """One attempt at the current endpoint.

        Raises:
            NoAnswer: the request may have been performed; the next attempt is at another endpoint.
            Refused: etcd refused the request, which was not performed.
        """
        number = self._current
        limit = self.attempt_s if limit is None else min(limit, self.attempt_s)
        try:
            try:
                return self._call_at(number, path, body, limit, self._authorization(number, limit))
            except Refused as e:
                if not (self._security.user and _token_is_refused(e)):
                    raise
                self._token = ""
                return self._call_at(number, path, body, limit, self._authorization(number, limit))
        except (Refused, *_LOST) as e:
            if isinstance(e, Refused) and not _passes(e):
                raise
            self.leave(number)
            raise NoAnswer(f"{self.endpoints[number]}: {str(e) or type(e).__name__}") from e

    def repeat(self, path: str, body: Json, limit: float) -> Json:
        """Sends a request until it is answered, for `limit` seconds, then a `StoreError`: only for
        requests that may be performed twice. `Refused` as by `call`.
        """
        deadline = time.monotonic() + limit
        attempt = 0
        while True:
            try:
                return self.call(path, body, max(0.01, deadline - time.monotonic()))
            except NoAnswer as e:
                attempt += 1
                pause = pause_before(attempt, len(self.endpoints))
                if time.monotonic() + pause >= deadline:
                    raise no_answer(self, limit, e) from e
                time.sleep(pause)

    def stream(self, path: str, body: Json) -> tuple[int, Stream]:
        """A stream from the current endpoint, and the endpoint's number. Raises as `call` does."""
        number = self._current
        connection: Connection | None = None
        try:
            headers = self._authorization(number, self.attempt_s)
            connection = connect(self.endpoints[number], self._tls, self.attempt_s)
            return number, connection.stream(path, body, headers)
        except _LOST as e:
            if connection is not None:
                connection.close()
            self.leave(number)
            raise NoAnswer(f"{self.endpoints[number]}: {str(e) or type(e).__name__}") from e

    def is_alive(self, number: int) -> bool:
        """Whether a member answers a linearizable read, that is, is in touch with a majority."""
        body = layout.range_of(b"\0", count_only=True)
        try:
            headers = self._authorization(number, self.attempt_s)
            self._call_at(number, "/v3/kv/range", body, self.attempt_s, headers)
        except Refused as e:
            return not _passes(e)
        except _LOST:
            return False
        return True

    def forget_token(self) -> None:
        """The token was refused: the next request gets another."""
        self._token = ""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _authorization(self, number: int, limit: float) -> dict[str, str]:
        user = self._security.user
        if user and not self._token:
            body = {"name": user, "password": self._security.password}
            answer = self._call_at(number, "/v3/auth/authenticate", body, limit, {})
            self._token = str(answer["token"])
        return {"Authorization": self._token} if user else {}

    def _call_at(
        self, number: int, path: str, body: Json, limit: float, headers: dict[str, str]
    ) -> Json:
        connection = self._take(number)
        try:
            if connection is None:
                connection = connect(self.endpoints[number], self._tls, limit)
            answer = connection.request(path, body, headers, limit)
        except BaseException as e:
            # After a refusal too: the gateway may have more to say than was read.
            if connection is not None:
                connection.close()
            if not isinstance(e, Refused):
                self._drop_idle(number)
            raise
        self._keep(number, connection)
        return answer

    def _take(self, number: int) -> Connection | None:
        with self._lock:
            if self._closed:
                raise ConnectionError("the client is closed")
            idle = self._idle.get(number)
            return idle.pop() if idle else None

    def _keep(self, number: int, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(number, []).append(connection)
                return
        connection.close()

    def _drop_idle(self, number: int) -> None:
        with self._lock:
            dropped = self._idle.pop(number, [])
        for connection in dropped:
            connection.close()

    def leave(self, number: int) -> None:
        """Asks another endpoint from now on, if `number` is the current one."""
        with self._lock:
            if self._current == number:
                self._current = (number + 1) % len(self.endpoints)


def pause_before(attempt: int, endpoints: int) -> float:
    """The pause before an attempt, in seconds: none until each endpoint was asked."""
    if attempt < endpoints:
        return 0.0
    return min(_FIRST_PAUSE_S * 2.0 ** min(attempt - endpoints, 10), _LONGEST_PAUSE_S)


def no_answer(client: EtcdClient, limit: float, cause: Exception) -> StoreError:
    """The error for a cluster that does not answer."""
    return StoreError(f"etcd at {client.where} did not answer for {limit:.1f} s; last: {cause}")


def _token_is_refused(error: Refused) -> bool:
    # A token expires five minutes after its last use, and is unknown to a member that restarted. A
    # change of users or roles makes tokens old.
    return error.code == _UNAUTHENTICATED or (
        error.code == _INVALID and "revision" in str(error) and "auth" in str(error)
    )


def _passes(error: Refused) -> bool:
    busy = error.code == _EXHAUSTED and "too many requests" in str(error)
    return error.code in _PASSING or busy

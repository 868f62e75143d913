"""The waits of a process on etcd, served by one watch on a prefix.

A wait begins at the revision of the read that found nothing: an event at a later revision ends it.
If that is a write of `start` itself, it has the value: `put` and `claim` leave nothing else of a
key. If it is empty, as before the first entry of a key, or another key's, the value is to be read.

The watch runs in a thread of its own and may be ahead of that revision; so it remembers the latest
events. A wait that begins before the oldest event that is remembered ends at once, and reads again.

From a listing and the events, the watch also knows which keys exist. A wait for a key that did not
exist at the last event needs no read before: it begins at the revision of that event.

A stream that is silent may have lost its member. After `SILENCE_S` the member must answer a
linearizable read, or the watch moves to another. It then begins after the last revision it has
seen, so no event is lost. If that is compacted, it begins at the present, and all waits read again.
"""

from __future__ import annotations

import base64
import bisect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.client import EtcdClient, pause_before
from outlast.coordination.stores.etcd.connection import Json, Refused, Stream
from outlast.coordination.stores.etcd.operations import NoAnswer
from outlast.system.parallel import start_thread

SILENCE_S = 2.0
_REMEMBERED = 4096
_REMEMBERED_BYTES = 4096  # a longer value is not remembered, and is read
_OUT_OF_RANGE = 11


@dataclass(eq=False, frozen=True)
class Wait:
    """A wait for a write of a key from `start` to below `end` at a revision above `after`. `over`
    is called with the value of `start`, or with `None` if that is to be read.
    """

    start: bytes
    end: bytes
    after: int
    over: Callable[[bytes | None], None]

    def has(self, key: bytes) -> bool:
        return self.start <= key < self.end


class Waits:
    """The waits for keys that begin with `prefix`. The thread starts with the first wait.
    `deletes`: whether the deletion of a key ends its waits too.
    """

    def __init__(self, client: EtcdClient, prefix: bytes, *, deletes: bool = False) -> None:
        self._client, self._prefix, self._deletes = client, prefix, deletes
        self._present: set[bytes] | None = None  # at `_seen`; unknown before there is a listing
        self._lock = threading.Lock()
        self._waits: set[Wait] = set()
        self._events: deque[tuple[int, bytes, bytes | None]] = deque()
        self._since = 0  # all events above this revision, up to `_seen`, are in `_events`
        self._seen = 0
        self._begun = False
        self._thread: threading.Thread | None = None
        self._stream: Stream | None = None
        self._closed = False
        self._wake = threading.Event()
        self.restarts = 0

    def absent_at(self, key: bytes) -> int | None:
        """A revision at which `key` did not exist; `None` if that has to be found by a read."""
        with self._lock:
            known = self._present is not None and key not in self._present
            return self._seen if known else None

    def wait(self, start: bytes, end: bytes, after: int, timeout: float | None) -> bytes | bool:
        """Waits for a write of a key from `start` to below `end` at a revision above `after`.

        Returns the value of `start`, or True if it is to be read: maybe without such a write. False
        after `timeout` seconds.
        """
        came: Future[bytes | None] = Future()
        wait = self.call_at(start, end, after, came.set_result)
        try:
            value = came.result(timeout)
            return True if value is None else value
        except FutureTimeout:
            return False
        finally:
            self.cancel(wait)

    def call_at(
        self, start: bytes, end: bytes, after: int, over: Callable[[bytes | None], None]
    ) -> Wait:
        """Calls `over` once, in any thread, maybe at once. It must not block or use this object."""
        wait = Wait(start, end, after, over)
        with self._lock:
            if self._closed or (self._begun and after < self._since):  # its event may be forgotten
                wait.over(None)
                return wait
            if (event := self._happened(wait)) is not None:
                wait.over(event[2] if event[1] == start else None)
                return wait
            self._waits.add(wait)
            if not self._begun:
                self._begun = True
                self._since = self._seen = after
                self._begin()
        return wait

    def cancel(self, wait: Wait) -> None:
        """Ends a wait: its call is not made any more, unless it is being made."""
        with self._lock:
            self._waits.discard(wait)

    def wake_all(self) -> None:
        """Ends all waits, which then read again."""
        with self._lock:
            self._end(self._waits)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread, stream = self._thread, self._stream
            self._end(self._waits)
        self._wake.set()
        if stream is not None:
            stream.shut_down()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _end(self, waits: Iterable[Wait]) -> None:
        ended = list(waits)
        self._waits.difference_update(ended)
        for wait in ended:
            wait.over(None)

    def _happened(self, wait: Wait) -> tuple[int, bytes, bytes | None] | None:
        """The first event that ends it, of those that have come."""
        if not self._begun or wait.after >= self._seen:
            return None
        first = bisect.bisect_right(self._events, wait.after, key=lambda event: event[0])
        later = (self._events[n] for n in range(first, len(self._events)))
        return next((event for event in later if wait.has(event[1])), None)

    # -------------------------------------------------------------------------- the thread

    def _begin(self) -> None:
        self._thread = start_thread("outlast etcd watch", self._run)

    def _run(self) -> None:
        failures = 0
        while not self._closed:
            stream: Stream | None = None
            number = -1
            try:
                self._list()
                request = layout.range_of(self._prefix, layout.end_of(self._prefix))
                request |= {"start_revision": str(self._seen + 1)}
                number, stream = self._client.stream("/v3/watch", {"create_request": request})
                with self._lock:
                    self._stream = stream
                    if self._closed:
                        return
                if self._follow(number, stream):
                    failures = 0
            except (NoAnswer, Refused, OSError, KeyError, ValueError):
                # The last two: what answered is not etcd, a proxy for example.
                failures += 1
                if number >= 0:
                    self._client.leave(number)
                self._client.forget_token()
                self._wake.wait(pause_before(failures, len(self._client.endpoints)))
            finally:
                with self._lock:
                    self._stream = None
                if stream is not None:
                    stream.close()
            self.restarts += 1

    def _list(self) -> None:
        if self._deletes or self._present is not None:
            return
        options = {"keys_only": True, "revision": str(self._seen)}
        body = layout.range_of(self._prefix, layout.end_of(self._prefix), **options)
        try:
            found = layout.entries(self._client.call("/v3/kv/range", body))
        except Refused as e:
            if e.code != _OUT_OF_RANGE:
                raise
            return  # it is compacted: the watch will be told so
        with self._lock:
            self._present = {entry.key for entry in found}

    def _follow(self, number: int, stream: Stream) -> bool:
        """Reads a stream until another must be opened. Returns whether it was of use."""
        last = time.monotonic()
        answered = False
        while not self._closed:
            for message in stream.read(SILENCE_S):
                last = time.monotonic()
                result = message.get("result", {})
                if result.get("canceled"):
                    return self._canceled(result)
                answered = True
                self._dispatch(result)
            if time.monotonic() - last >= SILENCE_S:
                if not answered or not self._client.is_alive(number):
                    raise NoAnswer(f"{self._client.endpoints[number]} does not answer")
                last = time.monotonic()
        return answered

    def _canceled(self, result: Json) -> bool:
        compacted = int(result.get("compact_revision", 0))
        if not compacted:
            raise Refused(_OUT_OF_RANGE, str(result.get("cancel_reason", "")))
        # The new stream begins at a revision that etcd still has. The events in between are lost:
        # waits that began before it read again, now and (by `_since`) when they register.
        with self._lock:
            self._seen = self._since = compacted
            self._events.clear()
            self._present = None
            self._end(self._waits)
        return True

    def _dispatch(self, result: Json) -> None:
        with self._lock:
            for event in result.get("events", ()):
                kv = event["kv"]
                key, revision = base64.b64decode(kv["key"]), int(kv["mod_revision"])
                written = event.get("type", "PUT") == "PUT"
                value = (base64.b64decode(kv.get("value", "")) or None) if written else None
                if self._present is not None:
                    (self._present.add if written else self._present.discard)(key)
                if not written and not self._deletes:
                    self._seen = max(self._seen, revision)
                    continue
                kept = value if value is not None and len(value) <= _REMEMBERED_BYTES else None
                self._events.append((revision, key, kept))
                self._seen = max(self._seen, revision)
                for wait in [w for w in self._waits if revision > w.after and w.has(key)]:
                    self._waits.discard(wait)
                    wait.over(value if key == wait.start else None)
            while len(self._events) > _REMEMBERED:
                self._since = self._events.popleft()[0]

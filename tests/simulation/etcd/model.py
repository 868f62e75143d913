"""A model of etcd for the simulation: revisions, transactions, leases, history and compaction.

It answers the requests of etcd's JSON gateway that `outlast` sends, as etcd 3.4 and later answer
them. What concerns time and the network (lost answers, late copies of requests, changes of the
leader, the lag of watches) is the simulation's part (`simulation.py`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outlast.coordination.stores.etcd.connection import Refused

Json = dict[str, Any]

_NOT_FOUND, INVALID, _OUT_OF_RANGE = 5, 3, 11


@dataclass(frozen=True)
class Held:
    """A key."""

    value: bytes
    created: int
    modified: int
    lease: int


Keys = dict[bytes, Held]


@dataclass(frozen=True)
class Change:
    """An event of a watch."""

    revision: int
    key: bytes
    deleted: bool
    value: bytes = b""


class EtcdModel:
    """The state of a cluster. Requests are performed one at a time, as its consensus does."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.keys: Keys = {}
        self.history: dict[int, Keys] = {1: {}}
        self.changes: list[Change] = []
        self.leases: set[int] = set()

    def call(self, path: str, body: Json) -> Json:
        """Performs a request. Raises `Refused` as etcd does."""
        if path == "/v3/kv/range":
            return {**self._header(), **self._range(body, self.keys)}
        if path != "/v3/kv/txn":
            raise NotImplementedError(path)
        work = _Work(self)
        _check_puts(body)
        succeeded, responses = work.run(body)
        work.commit()
        return {**self._header(), "succeeded": succeeded, "responses": responses}

    def grant(self, lease: int, key: bytes) -> None:
        """Grants a lease, and puts a key under it."""
        self.leases.add(lease)
        work = _Work(self)
        work.put(key, b"", lease)
        work.commit()

    def expire(self, lease: int) -> None:
        """Ends a lease: all its keys are deleted in one revision."""
        self.leases.discard(lease)
        work = _Work(self)
        for key in [key for key, held in self.keys.items() if held.lease == lease]:
            work.remove(key)
        work.commit()

    def compact(self) -> None:
        """Forgets all revisions before the present one."""
        self.compacted = self.revision
        for revision in [r for r in self.history if r < self.revision]:
            del self.history[revision]
        self.changes = [change for change in self.changes if change.revision > self.compacted]

    def _header(self) -> Json:
        return {"header": {"revision": str(self.revision)}}

    def _range(self, body: Json, keys: Keys) -> Json:
        revision = int(body.get("revision", 0))
        if revision > self.revision:
            raise Refused(_OUT_OF_RANGE, "required revision is a future revision")
        if revision:
            # The revision that was compacted last can still be read.
            if revision < self.compacted or revision not in self.history:
                raise Refused(_OUT_OF_RANGE, "required revision has been compacted")
            keys = self.history[revision]
        found = [(key, keys[key]) for key in _selected(body, keys)]
        answer: Json = {"count": str(len(found))}
        if not body.get("count_only"):
            answer["kvs"] = [_kv(key, held, body.get("keys_only")) for key, held in found]
        return answer


class _Work:
    """The steps of one transaction, which all get one revision."""

    def __init__(self, model: EtcdModel) -> None:
        self._model = model
        self._keys = dict(model.keys)
        self._revision = model.revision + 1
        self._changes: list[Change] = []

    def run(self, body: Json) -> tuple[bool, list[Json]]:
        succeeded = all(self._holds(condition) for condition in body.get("compare", ()))
        steps = body.get("success" if succeeded else "failure", ())
        return succeeded, [self._step(step) for step in steps]

    def put(self, key: bytes, value: bytes, lease: int) -> None:
        if lease and lease not in self._model.leases:
            raise Refused(_NOT_FOUND, "etcdserver: requested lease not found")
        before = self._keys.get(key)
        created = self._revision if before is None else before.created
        self._keys[key] = Held(value, created, self._revision, lease)
        self._changes.append(Change(self._revision, key, deleted=False, value=value))

    def remove(self, key: bytes) -> None:
        del self._keys[key]
        self._changes.append(Change(self._revision, key, deleted=True))

    def commit(self) -> None:
        model = self._model
        if self._changes:
            model.keys, model.revision = self._keys, self._revision
            model.history[self._revision] = self._keys
            model.changes += self._changes

    def _step(self, step: Json) -> Json:
        [(name, body)] = step.items()
        if name == "request_range":
            return {"response_range": self._model._range(body, self._keys)}
        if name == "request_put":
            value = base64.b64decode(body["value"])
            self.put(base64.b64decode(body["key"]), value, int(body.get("lease", 0)))
            return {"response_put": {}}
        if name == "request_delete_range":
            doomed = _selected(body, self._keys)
            for key in doomed:
                self.remove(key)
            return {"response_delete_range": {"deleted": str(len(doomed))} if doomed else {}}
        succeeded, responses = self.run(body)
        # JSON leaves out what is false.
        return {
            "response_txn": {"responses": responses} | ({"succeeded": True} if succeeded else {})
        }

    def _holds(self, condition: Json) -> bool:
        found = [self._keys[key] for key in _selected(condition, self._keys)]
        # An absent key, or an empty range, has the revisions 0.
        return all(_compare(condition, held) for held in found or [Held(b"", 0, 0, 0)])


def _compare(condition: Json, held: Held) -> bool:
    if condition["target"] == "CREATE":
        mine, theirs = held.created, int(condition["create_revision"])
    else:
        mine, theirs = held.modified, int(condition["mod_revision"])
    holds: dict[str, Callable[[], bool]] = {
        "EQUAL": lambda: mine == theirs,
        "GREATER": lambda: mine > theirs,
        "LESS": lambda: mine < theirs,
    }
    return holds[condition["result"]]()


def _selected(body: Json, keys: Keys) -> list[bytes]:
    start = base64.b64decode(body["key"])
    if "range_end" not in body:
        return [start] if start in keys else []
    end = base64.b64decode(body["range_end"])
    return sorted(key for key in keys if start <= key < end)


def _kv(key: bytes, held: Held, keys_only: object) -> Json:
    held = replace(held, value=b"") if keys_only else held
    return {
        "key": base64.b64encode(key).decode(),
        "value": base64.b64encode(held.value).decode(),
        "create_revision": str(held.created),
        "mod_revision": str(held.modified),
    }


def _check_puts(body: Json) -> None:
    """Etcd refuses a transaction that may write a key twice."""
    for branch in ("success", "failure"):
        _written(body.get(branch, ()))


def _written(steps: list[Json]) -> list[tuple[bytes, bytes]]:
    ranges: list[tuple[bytes, bytes]] = []
    for step in steps:
        [(name, body)] = step.items()
        if name == "request_txn":
            _check_puts(body)
            found = _written(body.get("success", ())) + _written(body.get("failure", ()))
        elif name in ("request_put", "request_delete_range"):
            start = base64.b64decode(body["key"])
            end = base64.b64decode(body["range_end"]) if "range_end" in body else start + b"\0"
            found = [(start, end)]
        else:
            continue
        for start, end in found:
            if any(start < other_end and other < end for other, other_end in ranges):
                raise Refused(INVALID, "etcdserver: duplicate key given in txn request")
        ranges += found
    return ranges

r"""The keys in etcd that hold a key of the store, and the requests of etcd's JSON gateway.

The value of a store key K, which contains no NUL byte, is spread over etcd keys of its own:

    <root>s/K              the base: what `put`, `claim` or `compare_set` wrote
    <root>e/K\0a<id>       one `append`: its bytes
    <root>e/K\0n<id>       one `add`: its amount
    <root>e/K\0o<id>       one `add` of 1: counted by etcd, not transferred

The value is the base with the entries applied in order of their creation. `put`, `compare_set` and
`delete` remove all entries, so the base is older than every entry. The first entry creates an empty
base: the base exists if and only if the key does. So a watch on the bases sees each key appear, and
none of the entries, which all members write; a key is written at most once in a transaction.

    <root>o/<client>/<n>   the last write of a client's slot: see `operations.py`
    <root>h/<host>         a host of the group, under the host's lease
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outlast.errors import StoreError

Json = dict[str, Any]


class NoNumber(StoreError):
    """The value of a key is no number, and cannot be added to."""


APPENDED, AMOUNT, ONE = b"a", b"n", b"o"


def store_keys(root: bytes) -> bytes:
    """The prefix of the bases of all keys of the store."""
    return root + b"s/"


def host_keys(root: bytes) -> bytes:
    """The prefix of the keys of the hosts."""
    return root + b"h/"


def end_of(prefix: bytes) -> bytes:
    """The first key after all that begin with `prefix`, which ends in an ASCII character or NUL."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def base_key(root: bytes, key: str) -> bytes:
    """The etcd key of the base of `key`."""
    if "\0" in key:
        raise ValueError(f"the key {key!r} contains a NUL character")
    return store_keys(root) + key.encode()


def entry_key(root: bytes, key: str) -> bytes:
    """The prefix of the etcd keys of the entries of `key`."""
    return root + b"e/" + key.encode() + b"\0"


@dataclass(frozen=True)
class KeyValue:
    """A key in etcd, with its value and revisions."""

    key: bytes
    value: bytes
    created: int
    modified: int

    @property
    def kind(self) -> bytes:
        """b"" for the base; `APPENDED`, `AMOUNT` or `ONE` for an entry."""
        return self.key.partition(b"\0")[2][:1]


def value_of(entries: Sequence[KeyValue]) -> bytes | None:
    """The value of a store key: the base with its entries applied; `None` without any."""
    value: bytes | None = None
    for entry in sorted(entries, key=lambda e: (e.created, e.kind)):
        if not entry.kind:
            value = entry.value
        elif entry.kind == APPENDED:
            value = (value or b"") + entry.value
        else:
            value = b"%d" % (number(value, entry.key) + int(entry.value))
    return value


def number(value: bytes | None, key: bytes) -> int:
    """A value as a number, 0 if absent. `key` is for the error."""
    try:
        return int(value or b"0")
    except ValueError:
        name = key.partition(b"\0")[0].decode(errors="replace")
        raise NoNumber(f"add: the value under {name!r} is no number: {value!r:.80}") from None


# ------------------------------------------------------------------------------------ requests


def text(data: bytes) -> str:
    """Bytes as JSON carries them."""
    return base64.b64encode(data).decode()


def put(key: bytes, value: bytes, lease: int = 0) -> Json:
    """A step of a transaction: sets a key, under a lease unless that is 0."""
    body: Json = {"key": text(key), "value": text(value)}
    if lease:
        body["lease"] = str(lease)
    return {"request_put": body}


def range_of(start: bytes, end: bytes = b"", **options: Any) -> Json:
    """The keys from `start` to below `end`; without `end` the key `start`."""
    body: Json = {"key": text(start), **options}
    if end:
        body["range_end"] = text(end)
    return body


def get(start: bytes, end: bytes = b"", **options: Any) -> Json:
    """A step of a transaction: reads a key or a range."""
    return {"request_range": range_of(start, end, **options)}


def delete(start: bytes, end: bytes = b"") -> Json:
    """A step of a transaction: deletes a key or a range."""
    return {"request_delete_range": range_of(start, end)}


def transaction(compare: list[Json], success: list[Json], failure: list[Json]) -> Json:
    """Performs the steps in `success` if all conditions hold, otherwise those in `failure`."""
    return {"compare": compare, "success": success, "failure": failure}


def nested(compare: list[Json], success: list[Json]) -> Json:
    """A step of a transaction that has further conditions."""
    return {"request_txn": transaction(compare, success, [])}


def created(key: bytes, revision: int, end: bytes = b"") -> Json:
    """The condition that a key was created at `revision`; 0: it, or all of a range, is absent."""
    return range_of(key, end, target="CREATE", result="EQUAL", create_revision=str(revision))


def present(key: bytes) -> Json:
    """The condition that a key exists."""
    return range_of(key, target="CREATE", result="GREATER", create_revision="0")


def modified(key: bytes, revision: int) -> Json:
    """The condition that a key was last written at `revision`; 0: it is absent."""
    return range_of(key, target="MOD", result="EQUAL", mod_revision=str(revision))


def unchanged_since(start: bytes, end: bytes, revision: int) -> Json:
    """The condition that no key of the range was written after `revision`. Deletes do not count."""
    return range_of(start, end, target="MOD", result="LESS", mod_revision=str(revision + 1))


def entries(response: Json) -> list[KeyValue]:
    """The keys in the answer to a range."""
    response = response.get("response_range", response)
    return [
        KeyValue(
            base64.b64decode(kv["key"]),
            base64.b64decode(kv.get("value", "")),
            int(kv.get("create_revision", 0)),
            int(kv.get("mod_revision", 0)),
        )
        for kv in response.get("kvs", ())
    ]


def count(response: Json) -> int:
    """The number of keys in the answer to a step that reads a range."""
    return int(response["response_range"].get("count", 0))


def revision_of(answer: Json) -> int:
    """The revision of etcd at which a request was performed."""
    return int(answer["header"]["revision"])

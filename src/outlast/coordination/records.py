"""The records in the store: lines of JSON, not pickles: nothing from another host is executed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from outlast.events.fault_record import FaultRecord
from outlast.events.restart_causes import HANGS, Interruption

COMPLETED_BY = "completed-by"
"""Under the prefix of a call: the names of the processes that have completed it, one on each line,
for `outlast run`.
"""

SUSPECTED_LINK = "outlast/suspected-link"
"""Under no prefix, for `outlast run`: the key under which the members of a call wait, because the
link between two hosts may be broken (`suspects_link`).
"""

ENDED = "killed/"
"""In a call, followed by the name of a process: see `MembershipProtocol.announce_kill`."""


def process_name(host: str, pid: int) -> str:
    """The name of a process in the job; `host` is the ID of its host, empty in a job on one."""
    return f"{host}:{pid}" if host else str(pid)


def process_token(host: str, random: str) -> str:
    """The token with which a process registers; `host` as in `process_name`."""
    return f"{host}/{random}"


def belongs_to(token: str, owner: str) -> bool:
    """Whether a token is `owner`, or is of a process on the host with that ID."""
    return token == owner or token.startswith(process_token(owner, ""))


@dataclasses.dataclass(frozen=True)
class LostRecord:
    """A line of the ledger: `member` has left the job."""

    member: int
    reason: str
    discarded: bool = False  # it is healthy, and the rank assignment left it out
    ends_job: bool = False  # all other members are to end too
    moved: bool = False  # it has left in order, at the end of a step: see `moves`


@dataclasses.dataclass(frozen=True)
class StopRecord:
    """A request to stop: all leave with `exit_code`. `done` says what was saved, when all is."""

    reason: str
    exit_code: int
    done: str = ""


@dataclasses.dataclass(frozen=True)
class SizeRecord:
    """What the members that hold a restart for replacements tell the launchers."""

    ranks: int  # how many are there
    least: int  # how many the function needs at least; -1 if it has not got far enough to say
    wait_s: float = 0.0  # for how long the program wants to wait; 0 if it does not say


def to_line(record: Any) -> bytes:
    """A dataclass as one line of JSON."""
    return json.dumps(dataclasses.asdict(record), separators=(",", ":")).encode() + b"\n"


def lines(data: bytes | None) -> list[dict[str, Any]]:
    """The JSON objects of a log."""
    return [json.loads(line) for line in (data or b"").splitlines() if line]


_NETWORK_WORDS = ("connect", "timed out", "timeout", "unreachable", "no route to host")


def suspects_link(cause: FaultRecord) -> bool:
    """Whether the first cause of a restart may be a broken link between two hosts: a hang, a broken
    connection that no fault of a rank explains, or an error that speaks of the network. A wrong
    suspicion costs each host one connection to each other host.
    """
    if cause.interruption in HANGS or cause.consequence:
        return True
    text = cause.cause.lower()
    return cause.interruption == Interruption.EXCEPTION and any(
        word in text for word in _NETWORK_WORDS
    )


def pack(values: Iterable[Any]) -> list[list[Any]]:
    """`values` as runs: what all members read must not grow with their number. In a job of any
    size, members and ranks mostly count up, and most other values are equal. So the list of 16,384
    ranks is one run, `[0, 16384, 1]`: the first value, how many, and the step.
    """
    runs: list[list[Any]] = []
    for value in values:
        if runs:
            first, count, step = runs[-1]
            countable = type(first) is type(value) is int
            if count == 1 and countable and value == first + 1:
                runs[-1] = [first, 2, 1]
                continue
            if value == (first + count * step if countable else first) and (
                type(value) is type(first)
            ):
                runs[-1][1] += 1
                continue
        runs.append([value, 1, 0])
    return runs


def unpack(runs: Iterable[list[Any]]) -> list[Any]:
    """The inverse of `pack`."""
    values: list[Any] = []
    for first, count, step in runs:
        values += range(first, first + count) if step else [first] * count
    return values


def pack_records(records: list[dict[str, Any]]) -> bytes:
    """Records with the same names, as one line of JSON with a sequence of runs for each name."""
    names = sorted({name for record in records for name in record})
    columns = {name: pack(record.get(name) for record in records) for name in names}
    return json.dumps(columns, separators=(",", ":")).encode()


def unpack_columns(data: bytes) -> dict[str, list[Any]]:
    """The values of all records by name: without an object for each record."""
    return {name: unpack(runs) for name, runs in json.loads(data).items()}


def unpack_records(data: bytes) -> list[dict[str, Any]]:
    """The inverse of `pack_records`."""
    columns = unpack_columns(data)
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]

"""The records in the store: lines of JSON, not pickles: nothing from another host is executed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from outlast.events.hung_ranks import hung_ranks
from outlast.events.restart_causes import HANGS, HUNG, Interruption

COMPLETED_BY = "completed-by"
"""Under the prefix of a call: the names of the processes that have completed it, one on each line,
for `outlast run`.
"""

SUSPECTED_LINK = "outlast/suspected-link"
"""Under no prefix, for `outlast run`: the key under which the members of a call wait, because the
link between two hosts may be broken (`suspects_link`).
"""


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
class FaultRecord:
    """A fault in one iteration, as its own process, its monitor or an observer reported it.

    `pings`, `collectives` and `groups` are the progress of the member: among hung ranks, the one
    that is furthest behind is the likely cause.
    """

    iteration: int
    member: int
    rank: int
    host: str
    pid: int
    interruption: str  # a name of `restart_causes.Interruption`
    cause: str  # one line
    traceback: str = ""  # the whole traceback, or an empty string
    consequence: bool = False  # it looks like that of another fault: a closed connection
    pings: int = 0
    collectives: int = -1  # -1 if not known
    idle: float = 0.0  # how long the member had made no progress, in seconds
    own_report: bool = False  # the hung member reports itself: it knows where it was
    where: str = ""  # the place where the exception was raised, if there was one
    permanent: str = ""  # whether a restart would raise it again: `always`, `at start`, or empty
    step: int = 0  # the last training step in this iteration; 0 if none is known
    ran: float = 0.0  # how long it had made progress since its last ping, step or entry, in seconds
    overtaken: bool = False  # see `error_kinds.overtaken`
    mistake: bool = False  # a mistake in the user's program raises such an exception
    ends_job: bool = False  # the member ends the job, and leaves once it has saved what it keeps
    made: int = -1  # of a hung rank, where its loop is: see `training_step.Loop`
    passes: int = 0
    loop_at: str = ""
    # of each process group, the last collective: see `interruption/flight_recorder`
    groups: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def may_be_harmless(self) -> bool:
        """Whether the rank may not have failed by itself."""
        return self.consequence or self.overtaken


@dataclasses.dataclass(frozen=True)
class LostRecord:
    """A line of the ledger: `member` has left the job."""

    member: int
    reason: str
    discarded: bool = False  # it is healthy, and the rank assignment left it out
    ends_job: bool = False  # all other members are to end too


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


# A process that ended is the cause of the faults of its peers, whichever was reported first.
_SEVERITY: dict[str, int] = {
    Interruption.TERMINATED: 0,
    Interruption.HARD_TIMEOUT: 0,
    Interruption.UNRESPONSIVE: 1,
}


def first_cause(faults: list[FaultRecord]) -> FaultRecord | None:
    """The fault that caused the others.

    Echoes of another fault come last, in a hang after the hung ranks; before them, except in a
    hang, exceptions that an interrupt has overtaken, which the program may have handled. Of the
    hung ranks (`SOFT_TIMEOUT`), the one that the others waited for stands for all (`hung_ranks`).
    Otherwise the store's order decides: the order in which they were reported.
    """
    others = [fault for fault in faults if fault.interruption != HUNG]

    in_a_hang = any(fault.interruption == HUNG for fault in faults)

    def order(fault: FaultRecord) -> tuple[bool, bool, int, bool]:
        hung = fault.interruption == HUNG
        last = fault.consequence or (fault.overtaken and in_a_hang)
        return last, fault.overtaken, _SEVERITY.get(fault.interruption, 2), hung != last

    return min((*others, *hung_ranks(faults)[:1]), key=order, default=None)


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


# The ends of a member: none of them can come before it arrives at a barrier.
_ENDS = frozenset((*_SEVERITY, Interruption.BASE_EXCEPTION))


def ends(fault: FaultRecord) -> bool:
    """Whether the member no longer took part after this fault."""
    return fault.interruption in _ENDS


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


def unpack_records(data: bytes) -> list[dict[str, Any]]:
    """The inverse of `pack_records`."""
    columns = {name: unpack(runs) for name, runs in json.loads(data).items()}
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]

"""What stands in the store: records as lines of JSON, never pickles, so that nothing that comes
from another host is ever executed.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

__all__ = ["FaultRecord", "LostRecord", "first_cause", "lines", "to_line"]


@dataclasses.dataclass(frozen=True)
class FaultRecord:
    """A fault in one iteration, as its own process, its monitor or an observer reported it.

    Attributes:
        iteration, member, rank, host, pid: where it happened.
        interruption: a name of `outlast.inprocess.attribution.Interruption`.
        cause: one line.
        traceback: the whole traceback, or an empty string.
        consequence: whether it looks like the echo of another fault, such as the closed
            connection of a peer.
        pings: progress that the member had made; among hung ranks the least is the likely cause.
    """

    iteration: int
    member: int
    rank: int
    host: str
    pid: int
    interruption: str
    cause: str
    traceback: str = ""
    consequence: bool = False
    pings: int = 0


@dataclasses.dataclass(frozen=True)
class LostRecord:
    """A line of the ledger: `member` takes part no longer.

    `discarded` is a healthy member that the rank assignment left out; `ends_job` says that all
    other members are to end too.
    """

    member: int
    reason: str
    discarded: bool = False
    ends_job: bool = False


def to_line(record: Any) -> bytes:
    """A dataclass as one line of JSON."""
    return json.dumps(dataclasses.asdict(record), separators=(",", ":")).encode() + b"\n"


def lines(data: bytes | None) -> list[dict[str, Any]]:
    """The JSON objects of a log that lines were appended to."""
    return [json.loads(line) for line in (data or b"").splitlines() if line]


# A process that ended is the cause of what its peers met, whoever reported first.
_SEVERITY = {"TERMINATED": 0, "HARD_TIMEOUT": 0, "UNRESPONSIVE": 1}


def first_cause(faults: list[FaultRecord]) -> FaultRecord | None:
    """The fault that the others follow from.

    Echoes of another fault come last. Hung ranks (`SOFT_TIMEOUT`) are mostly the victims of one
    of them, and wait for it in a collective. Of each the last record counts: after its monitor, a
    rank itself says where it hung, and whether that is such a wait. Then the one that made the
    least progress is named. Otherwise the store's order, which is the order in which they were
    reported, decides.
    """
    if not faults:
        return None
    hung = {f.member: f for f in faults if f.interruption == "SOFT_TIMEOUT"}
    faults = [f for f in faults if f is hung.get(f.member, f) or f.interruption != "SOFT_TIMEOUT"]

    def order(item: tuple[int, FaultRecord]) -> tuple[bool, int, int, int]:
        position, fault = item
        is_hung = fault.interruption == "SOFT_TIMEOUT"
        return (
            fault.consequence,
            _SEVERITY.get(fault.interruption, 2),
            fault.pings if is_hung else -1,
            position,
        )

    return min(enumerate(faults), key=order)[1]

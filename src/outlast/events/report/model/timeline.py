"""The timeline of a run: what each rank did when, by host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Span:
    """A state of a rank, in seconds from the first event of its host.

    `state`: starting, restoring, training, hung, reserve (a spare rank, waiting), restarting, lost;
    of checkpoints: saving. Without `Wrapper`, training means that the process was running.
    """

    state: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment. `kind`: fault, consequence, injected, takeover, restored, not_saved, passed_over,
    host_lost, host_joined, stop, monitor_restarted, mismatch, straggler.
    """

    kind: str
    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One rank, the launcher or the checkpoints of a host.

    Attributes:
        rank: the launcher's number of the rank, or else the first rank of the process: a
            replacement continues the lane. -1 for other lanes.
    """

    name: str
    rank: int
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostTimeline:
    """The lanes of one host.

    Attributes:
        shift: what to add to the times of this host so that its entries into the function coincide
            with those of the host with the longest wall time, since clocks of hosts have nothing
            in common; `None` if they were in no common iteration.
    """

    host: str
    end: float
    shift: float | None
    lanes: tuple[Lane, ...]

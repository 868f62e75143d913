"""The events of faults that raise no error: replicas that differ, slow ranks, NaN."""

from __future__ import annotations

import dataclasses

from outlast.events.types.base import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaMismatch(Event, kind="replica_mismatch"):
    """Ranks that must hold the same parameters hold different ones; one rank writes it.

    `ranks` on `hosts` differ from the majority of the `replicas` ranks; without a `majority`, these
    ranks differ from one another. The difference was seen after `step`, and was not there after
    `clean_step`. `parameters` names where.
    """

    step: int = -1
    clean_step: int = -1
    replicas: int = 0
    ranks: list[int] = dataclasses.field(default_factory=list)
    hosts: list[str] = dataclasses.field(default_factory=list)
    majority: bool = False
    parameters: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StragglerFound(Event, kind="straggler_found"):
    """Rank `straggler` on host `straggler_host` is slower than the other ranks; rank 0 writes it.

    `seconds` is its time of a step, without waiting for other ranks, and `typical_seconds` that of
    the other ranks, each a median; it was seen in `windows` windows in a row, the last of which
    ended after `step`.
    """

    step: int = -1
    straggler: int = -1
    straggler_host: str = ""
    seconds: float = 0.0
    typical_seconds: float = 0.0
    windows: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFiniteFound(Event, kind="non_finite_found"):
    """A loss or parameters were not finite after `step`; each rank that finds it writes it.

    It was first seen on rank `first` on host `first_host`: in its `origin` ("loss", "gradients" or
    "parameters"). `parameters` names those that are not finite; they were after step `since`.
    """

    step: int = -1
    since: int = -1
    first: int = -1
    first_host: str = ""
    origin: str = ""
    parameters: list[str] = dataclasses.field(default_factory=list)

"""Faults that raised no error, as the report shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Replicas that differed: one for each set of ranks, however often they were seen to differ.

    Attributes:
        step, clean_step: of the first time: see `outlast.events.ReplicaMismatch`.
        checks: how many checks found it.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    majority: bool
    replicas: int
    step: int
    clean_step: int
    parameters: tuple[str, ...]
    checks: int
    host: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank on `straggler_host` that was slower than the others; times are medians of a step."""

    rank: int
    straggler_host: str
    step: int
    seconds: float
    typical_seconds: float
    host: str
    at: float

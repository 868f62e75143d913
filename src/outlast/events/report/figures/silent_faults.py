"""Finds the faults that raised no error: replicas that differed, slow ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from outlast.events import Event, ReplicaMismatch, StragglerFound
from outlast.events.report.model import Mismatch, Straggler


def find_mismatches(events: Iterable[Event], origins: Mapping[str, float]) -> tuple[Mismatch, ...]:
    """Each set of ranks that differed, at the first check that found it."""
    found: dict[tuple[int, ...], Mismatch] = {}
    for event in events:
        if not isinstance(event, ReplicaMismatch):
            continue
        ranks = tuple(event.ranks)
        before = found.get(ranks)
        if before is not None:
            found[ranks] = dataclasses.replace(before, checks=before.checks + 1)
            continue
        found[ranks] = Mismatch(
            ranks=ranks,
            hosts=tuple(event.hosts),
            majority=event.majority,
            replicas=event.replicas,
            step=event.step,
            clean_step=event.clean_step,
            parameters=tuple(event.parameters),
            checks=1,
            host=event.host,
            at=event.time - origins[event.host],
        )
    return tuple(found.values())


def find_stragglers(events: Iterable[Event], origins: Mapping[str, float]) -> tuple[Straggler, ...]:
    """The stragglers, in the order in which they were found."""
    return tuple(
        Straggler(
            rank=event.straggler,
            straggler_host=event.straggler_host,
            step=event.step,
            seconds=event.seconds,
            typical_seconds=event.typical_seconds,
            host=event.host,
            at=event.time - origins[event.host],
        )
        for event in events
        if isinstance(event, StragglerFound)
    )

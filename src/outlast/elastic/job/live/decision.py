"""Decides from which step and which ranks a job continues: a pure function of what they have.

Rank 0 calls it, and the others get the result: all ranks do the same, whatever changes meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from outlast.elastic.job.live.point import Place
from outlast.elastic.job.live.slots import Record


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one rank has, and what it needs.

    Attributes:
        records: the ranks' own states that this process has.
        signature: that of the model into which it loads.
        resizable: whether it can do without its own state in a job of another size.
        branches: how many branches it knows of.
        came_back: whether the last fault is equal to one before it, without progress in between.
        place: the state that its tensors hold, if they are at a step; then `settled`, `passes`,
            `held` (its signature) and `layout` describe them (`Frozen`).
        why: why they are at none; empty in a process that has noted no step.
    """

    records: Sequence[Record]
    signature: str
    resizable: bool
    branches: int
    place: Place | None = None
    settled: bool = False
    passes: int = 0
    held: str = ""
    layout: str = ""
    came_back: bool = False
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, given: dict[str, Any]) -> Offer:
        place = None if given["place"] is None else Place(**given["place"])
        records = [Record(**each) for each in given["records"]]
        return cls(**{**given, "place": place, "records": records})


@dataclasses.dataclass(frozen=True)
class Decision:
    """The state to continue from.

    Attributes:
        step, branch: identify it.
        sources: by each rank that receives the tensors, the ranks that have them.
        own: for each rank, the rank whose process has its own state, and of which rank it is, or
            `None` if it goes without.
        next_branch: that of the steps that follow.
    """

    step: int
    branch: str
    sources: dict[int, list[int]]
    own: list[tuple[int, Record] | None]
    next_branch: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, given: dict[str, Any]) -> Decision:
        sources = {int(rank): list(ranks) for rank, ranks in given["sources"].items()}
        own = [None if each is None else (each[0], Record(**each[1])) for each in given["own"]]
        return cls(**{**given, "sources": sources, "own": own})


def next_branch(offers: Sequence[Offer], mark: str) -> str:
    """The name of a new branch; `mark` makes it unique. Later ones are greater."""
    return f"{1 + max(offer.branches for offer in offers):09d}-{mark}"


def decide(offers: Sequence[Offer], branch: str) -> Decision | str:
    """The newest state of which all parts are left; why there is none otherwise, which is empty if
    no process has noted a step. `offers` are in the order of the ranks; `branch` is that of the
    steps that follow.
    """
    if not any(offer.place or offer.why or offer.records for offer in offers):
        return ""
    if any(offer.came_back for offer in offers):
        return "the same fault came back, so the state of the ranks may be its cause"
    states = {(o.place.step, o.place.branch) for o in offers if o.place is not None}
    missing: list[str] = []
    for step, made_on in sorted(states, reverse=True):
        found = _complete(offers, step, made_on, branch)
        if isinstance(found, Decision):
            return found
        missing.append(f"step {step} lacks {found}")
    by_reason: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        if offer.place is None:
            by_reason.setdefault(offer.why or "a new process", []).append(rank)
    return "; ".join([*missing, *(f"{names(ranks)}: {why}" for why, ranks in by_reason.items())])


def names(ranks: Sequence[int]) -> str:
    """The ranks, as a text."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _complete(offers: Sequence[Offer], step: int, made_on: str, branch: str) -> Decision | str:
    """The decision for this state, or what is missing of it."""
    size = len(offers)
    at_step = [
        rank
        for rank, offer in enumerate(offers)
        if offer.place is not None and (offer.place.step, offer.place.branch) == (step, made_on)
    ]
    sources: dict[int, list[int]] = {}
    for rank, offer in enumerate(offers):
        alike = [each for each in at_step if offers[each].held == offer.signature]
        if rank in alike:
            continue
        if not alike:
            return f"the tensors of rank {rank}"
        layout = offers[alike[0]].layout
        sources[rank] = [each for each in alike if offers[each].layout == layout]
    places = [offers[rank].place for rank in at_step]
    sizes = {place.world_size for place in places if place is not None}
    if sizes != {size}:
        if not all(offer.resizable for offer in offers):
            return f"a state that fits {size} ranks instead of {min(sizes)}"
        return Decision(step, made_on, sources, _kept(offers, step, made_on), branch)
    # What a rank has noted during the step holds only if nothing has changed until its end, and if
    # it was noted in the last backward pass of the step.
    settled = all(offers[rank].settled for rank in at_step)
    passes = {offers[rank].passes for rank in at_step}
    own: list[tuple[int, Record] | None] = []
    for rank in range(size):
        holders = [
            (holder != rank, not record.final, holder, record)
            for holder, offer in enumerate(offers)
            for record in offer.records
            if (record.step, record.branch) == (step, made_on)
            and (record.rank, record.world_size) == (rank, size)
            and (record.final or (settled and {record.passes} == passes))
        ]
        if not holders:
            return f"the random generators and other states of rank {rank} alone"
        *_, holder, record = min(holders, key=lambda each: each[:3])
        own.append((holder, record))
    return Decision(step, made_on, sources, own, branch)


def _kept(offers: Sequence[Offer], step: int, made_on: str) -> list[tuple[int, Record] | None]:
    """In a job of another size: each process keeps its own state, if it has one."""
    found: list[tuple[int, Record] | None] = []
    for rank, offer in enumerate(offers):
        own = [
            record
            for record in offer.records
            if (record.step, record.branch) == (step, made_on) and record.final
        ]
        found.append((rank, own[0]) if own else None)
    return found

"""Decides from which step and which ranks a job continues: a pure function of what they have.

Rank 0 calls it, and the others get the result: all ranks do the same, whatever changes meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from outlast.elastic.job.live.frozen import Held
from outlast.elastic.job.live.own_state import Record
from outlast.elastic.job.same_on_all_ranks import names_of


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one rank has, and what it needs.

    Attributes:
        records: the ranks' own states that this process has.
        signature: that of the model into which it loads.
        resizable: whether it can do without its own state in a job of another size.
        branches: how many branches it knows of.
        came_back: whether the last fault is equal to one before it, without progress in between.
        held: what its tensors hold, if they are at a step.
        why: why they are at none; empty in a process that has noted no step.
    """

    records: list[Record]
    signature: str
    resizable: bool
    branches: int
    held: Held | None = None
    came_back: bool = False
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The state to continue from.

    Attributes:
        step, branch: identify it.
        sources: by each rank that receives the tensors, the ranks that have them.
        own: for each rank, the rank whose process has its own state, and which state that is;
            `None` if it goes without.
        next_branch: that of the steps that follow.
    """

    step: int
    branch: str
    sources: dict[int, list[int]]
    own: list[tuple[int, Record | None]]
    next_branch: str


def next_branch(offers: Sequence[Offer], mark: str) -> str:
    """The name of a new branch; `mark` makes it unique. Later ones are greater."""
    return f"{1 + max(offer.branches for offer in offers):09d}-{mark}"


def choose(offers: Sequence[Offer], branch: str) -> Choice | str:
    """The newest state of which all parts are left; why there is none otherwise, which is empty if
    no process has noted a step. `offers` are in the order of the ranks; `branch` is that of the
    steps that follow.
    """
    if not any(offer.held or offer.why or offer.records for offer in offers):
        return ""
    if any(offer.came_back for offer in offers):
        return "the same fault came back, so the state of the ranks may be its cause"
    states = {(o.held.record.step, o.held.record.branch) for o in offers if o.held is not None}
    missing: list[str] = []
    for step, made_on in sorted(states, reverse=True):
        found = _complete(offers, step, made_on, branch)
        if isinstance(found, Choice):
            return found
        missing.append(f"step {step} lacks {found}")
    by_reason: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        if offer.held is None:
            by_reason.setdefault(offer.why or "a new process", []).append(rank)
    return "; ".join([*missing, *(f"{names_of(ranks)}: {why}" for why, ranks in by_reason.items())])


def _complete(offers: Sequence[Offer], step: int, made_on: str, branch: str) -> Choice | str:
    """The choice of this state, or what is missing of it."""
    size = len(offers)
    held = {
        rank: offer.held
        for rank, offer in enumerate(offers)
        if offer.held is not None
        and (offer.held.record.step, offer.held.record.branch) == (step, made_on)
    }
    sources: dict[int, list[int]] = {}
    for rank, offer in enumerate(offers):
        alike = [each for each, found in held.items() if found.signature == offer.signature]
        if rank in alike:
            continue
        if not alike:
            return f"the tensors of rank {rank}"
        layout = held[alike[0]].layout
        sources[rank] = [each for each in alike if held[each].layout == layout]
    records = [
        (holder, record)
        for holder, offer in enumerate(offers)
        for record in offer.records
        if (record.step, record.branch) == (step, made_on)
    ]
    own: list[tuple[int, Record | None]] = []
    sizes = {found.record.world_size for found in held.values()}
    if sizes != {size}:
        if not all(offer.resizable for offer in offers):
            return f"a state that fits {size} ranks instead of {min(sizes)}"
        # Each process keeps its own state, if it has one.
        for rank in range(size):
            final = [record for holder, record in records if holder == rank and record.final]
            own.append((rank, final[0] if final else None))
        return Choice(step, made_on, sources, own, branch)
    # What a rank has noted during the step holds only if nothing has changed until its end, and if
    # it was noted in the last backward pass of the step.
    settled = all(found.settled for found in held.values())
    passes = {found.passes for found in held.values()}
    for rank in range(size):
        usable = [
            (holder != rank, not record.final, holder, record)
            for holder, record in records
            if (record.rank, record.world_size) == (rank, size)
            and (record.final or (settled and {record.passes} == passes))
        ]
        if not usable:
            return f"the random generators and other states of rank {rank} alone"
        *_, holder, record = min(usable, key=lambda each: each[:3])
        own.append((holder, record))
    return Choice(step, made_on, sources, own, branch)

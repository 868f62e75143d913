"""Compares the digests of replicas: which ranks differ, and which of them a majority outvotes.

A buffer is compared while its content stays: it was equal on all replicas, and one of them has kept
it. Where all have changed it, in a way that torch does not count, it is not compared any more.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

log = logging.getLogger("outlast.elastic")

Key = TypeVar("Key")  # of a digest: the number of a piece, or the name of a buffer


@dataclasses.dataclass(frozen=True)
class Record:
    """What one rank publishes about one cycle."""

    signature: str  # of the layout; ranks with the same one hold the same parameters
    host: str
    first: int  # the step after which the first slice was hashed; every further one a step later
    slices: list[int]  # the number of pieces of each
    digests: list[str | None]  # of each piece; `None` if it was written to while it was hashed
    known: int = -1  # the last clean step that the rank knows of
    # The digests of buffers that were not written to, by name, as of `first`.
    buffers: dict[str, str] = dataclasses.field(default_factory=dict)
    batches: int = 0  # how many the rank had taken then: equal on all ranks

    def step_of(self, piece: int) -> int:
        """The step after which this piece was hashed."""
        step, left = self.first, piece
        for size in self.slices:
            if left < size:
                break
            left -= size
            step += 1
        return step


@dataclasses.dataclass(frozen=True)
class Difference:
    """What differs among the ranks that hold the same parameters."""

    replicas: list[int]  # these ranks
    ranks: list[int]  # those whose digests are not those of the majority; without one, all
    hosts: list[str]  # of `ranks`
    majority: bool  # whether more than half of the replicas agree on each piece that differs
    pieces: list[int]  # the numbers of those that differ
    step: int  # after which the first of them was hashed
    buffers: list[str] = dataclasses.field(default_factory=list)  # the names of those that differ


def compare(records: Sequence[Record]) -> list[Difference]:
    """The differences in one cycle; `records` are in the order of the ranks."""
    found = []
    for replicas in _alike(records).values():
        pieces = range(len(records[replicas[0]].digests))
        held = {
            piece: {r: d for r in replicas if (d := records[r].digests[piece]) is not None}
            for piece in pieces
        }
        wrong, differing, majority = _outvoted(held)
        if differing:
            # A rank that a majority calls wrong is named, unless other pieces leave open who is.
            hosts = [records[rank].host for rank in wrong]
            step = records[wrong[0]].step_of(differing[0])
            found.append(Difference(replicas, wrong, hosts, majority, differing, step))
    return found


def _outvoted(held: Mapping[Key, Mapping[int, str]]) -> tuple[list[int], list[Key], bool]:
    """The ranks that differ from the majority, or all where there is none; the keys whose digests
    differ; and whether each of these has a majority. `held` are the digests by key and rank.
    """
    wrong: set[int] = set()
    differing: list[Key] = []
    majority = True
    for key, digests in held.items():
        counts = Counter(digests.values())
        if len(counts) < 2:
            continue
        differing.append(key)
        digest_of_most, count = counts.most_common(1)[0]
        if 2 * count > len(digests):
            wrong.update(rank for rank, digest in digests.items() if digest != digest_of_most)
        else:
            wrong.update(digests)
            majority = False
    return sorted(wrong), differing, majority


class _Buffers:
    """Compares the buffers of one cycle after the other."""

    def __init__(self) -> None:
        self._constant: dict[tuple[str, str], str] = {}  # the digest that all replicas had
        self._not_compared: set[tuple[str, str]] = set()

    def __call__(self, records: Sequence[Record]) -> list[Difference]:
        found = []
        for signature, replicas in _alike(records).items():
            held: dict[str, dict[int, str]] = {}
            for name in sorted({name for rank in replicas for name in records[rank].buffers}):
                buffers = {rank: records[rank].buffers for rank in replicas}
                digests = {rank: own[name] for rank, own in buffers.items() if name in own}
                if self._must_be_equal((signature, name), set(digests.values())):
                    held[name] = digests
            wrong, names, majority = _outvoted(held)
            if names:
                hosts = [records[rank].host for rank in wrong]
                step = records[wrong[0]].first
                found.append(Difference(replicas, wrong, hosts, majority, [], step, names))
        return found

    def _must_be_equal(self, key: tuple[str, str], digests: set[str]) -> bool:
        if key in self._not_compared:
            return False
        before = self._constant.get(key)
        if before is None and len(digests) == 1:
            self._constant[key] = next(iter(digests))
            return True
        if before is None or before not in digests:
            self._not_compared.add(key)
            return False
        return True


def _alike(records: Sequence[Record]) -> dict[str, list[int]]:
    """The ranks that hold the same parameters, by signature."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, record in enumerate(records):
        alike[record.signature].append(rank)
    return alike


@dataclasses.dataclass(frozen=True)
class Result:
    """What rank 0 publishes about one cycle."""

    first: int  # the step after which it began
    clean_step: int  # the last one after which all compared digests were known to be equal
    differences: list[Difference]  # one for each set of replicas that differ


class Judge:
    """Compares one cycle after the other, on rank 0. `clean_step` is the last step after which the
    replicas are known to have been equal; `known_by_all` is the same, as far as every rank knows
    it: whichever ranks survive a fault, the check that follows begins with it or a later one.
    """

    def __init__(self, clean_step: int) -> None:
        self.clean_step = self.known_by_all = clean_step
        self._buffers = _Buffers()

    def __call__(self, records: Sequence[Record]) -> Result:
        differences = compare(records) + self._buffers(records)
        first = min(record.first for record in records)
        places = [f"step {each.first}, {each.batches} batches taken" for each in records]
        if differences and len(set(places)) > 1:
            # That is why, and no fault of the hardware. A save is an error.
            log.warning("the replicas differ, and are not at the same step: %s", places)
            return Result(first, self.clean_step, [])
        self.known_by_all = max(self.known_by_all, min(record.known for record in records))
        # A piece that was skipped everywhere says nothing about this cycle.
        complete = all(None not in record.digests for record in records)
        if not differences and complete:
            self.clean_step = max(self.clean_step, first)
        return Result(first, self.clean_step, differences)

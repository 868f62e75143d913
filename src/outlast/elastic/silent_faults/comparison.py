"""Compares the digests of replicas: which ranks differ, and which of them a majority outvotes."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Record:
    """What one rank publishes about one cycle.

    Attributes:
        signature: of the layout; ranks with the same one hold the same parameters.
        first: the step after which the first slice was hashed; every further slice one step later.
        slices: the number of pieces of each slice.
        digests: of each piece; `None` if its parameters were written to while they were hashed.
        known: the last clean step that the rank knows of.
    """

    signature: str
    host: str
    first: int
    slices: list[int]
    digests: list[str | None]
    known: int = -1

    def encode(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Record:
        return cls(**json.loads(text))

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
    """What differs among the ranks that hold the same parameters.

    Attributes:
        replicas: these ranks.
        ranks: those whose digests are not those of the majority; without a majority, all.
        hosts: of `ranks`.
        majority: whether more than half of the replicas agree on each piece that differs.
        pieces: the numbers of the pieces that differ.
        step: the step after which the first of them was hashed.
    """

    replicas: list[int]
    ranks: list[int]
    hosts: list[str]
    majority: bool
    pieces: list[int]
    step: int


def compare(records: Sequence[Record]) -> list[Difference]:
    """The differences in one cycle; `records` are in the order of the ranks."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, record in enumerate(records):
        alike[record.signature].append(rank)
    found = [_compare_replicas(records, ranks) for ranks in alike.values()]
    return [difference for difference in found if difference is not None]


def _compare_replicas(records: Sequence[Record], replicas: list[int]) -> Difference | None:
    wrong: set[int] = set()
    pieces: list[int] = []
    majority = True
    for piece in range(len(records[replicas[0]].digests)):
        held = {
            rank: digest
            for rank in replicas
            if (digest := records[rank].digests[piece]) is not None
        }
        counts = Counter(held.values())
        if len(counts) < 2:
            continue
        pieces.append(piece)
        most, count = counts.most_common(1)[0]
        if 2 * count > len(held):
            wrong.update(rank for rank, digest in held.items() if digest != most)
        else:
            majority = False
            wrong.update(held)
    if not pieces:
        return None
    # A rank that a majority calls wrong is named, unless other pieces leave open who is.
    ranks = sorted(wrong)
    return Difference(
        replicas=replicas,
        ranks=ranks,
        hosts=[records[rank].host for rank in ranks],
        majority=majority,
        pieces=pieces,
        step=records[ranks[0]].step_of(pieces[0]),
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """What rank 0 publishes about one cycle.

    Attributes:
        first: the step after which the cycle began.
        clean_step: the last step after which all compared digests were known to be equal: of this
            cycle if nothing differs.
        differences: one for each set of replicas that differ.
    """

    first: int
    clean_step: int
    differences: list[Difference]

    def encode(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Result:
        values = json.loads(text)
        values["differences"] = [Difference(**each) for each in values["differences"]]
        return cls(**values)


class Judge:
    """Compares one cycle after the other, on rank 0.

    Attributes:
        clean_step: the last step after which the replicas are known to have been equal. At first
            that of the state from which the check began.
        known_by_all: the same, as far as every rank knows it: whichever ranks survive a fault, the
            check that follows begins with this step or a later one.
    """

    def __init__(self, clean_step: int) -> None:
        self.clean_step = self.known_by_all = clean_step

    def __call__(self, texts: Sequence[str]) -> str:
        records = [Record.decode(text) for text in texts]
        differences = compare(records)
        first = min(record.first for record in records)
        self.known_by_all = max(self.known_by_all, min(record.known for record in records))
        # A piece that was skipped everywhere says nothing about this cycle.
        complete = all(None not in record.digests for record in records)
        if not differences and complete:
            self.clean_step = max(self.clean_step, first)
        return Result(first, self.clean_step, differences).encode()

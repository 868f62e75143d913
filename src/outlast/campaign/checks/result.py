"""Compares the result of a disturbed round with that of the undisturbed run, bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from outlast.campaign.records import End, Step, read_ends, read_steps

_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Reference:
    """The result of the undisturbed run.

    Attributes:
        losses: the exact loss of each step on each rank, by (step, rank).
        ends: the result of each rank.
    """

    losses: dict[tuple[int, int], str]
    ends: dict[int, End]

    @classmethod
    def read(cls, folder: Path) -> Reference:
        """From the records of a run."""
        losses = {(one.step, one.rank): one.loss for one in read_steps(folder)}
        return cls(losses, {end.rank: end for end in read_ends(folder)})


def differences(reference: Reference, folder: Path) -> list[str]:
    """What differs between the records in `folder` and the reference, in words.

    Steps that were repeated after a restore must have the same loss each time. A rank that dies
    between the collective of a step and its record has none of that step, if the other ranks have
    completed it: its replacement continues from their state.
    """
    steps = read_steps(folder)
    return [*_of_losses(reference.losses, steps), *_of_ends(reference.ends, read_ends(folder))]


def _of_losses(expected: dict[tuple[int, int], str], steps: Sequence[Step]) -> Iterable[str]:
    wrong = [
        f"step {one.step} on rank {one.rank}: the loss is {one.loss}, undisturbed "
        f"{expected.get((one.step, one.rank), 'there is no such step')}"
        for one in steps
        if expected.get((one.step, one.rank)) != one.loss
    ]
    yield from wrong[:_NAMED]
    if len(wrong) > _NAMED:
        yield f"... and {len(wrong) - _NAMED} more losses"
    missing = sorted({step for step, _ in expected} - {one.step for one in steps})
    if missing:
        yield f"{len(missing)} steps were never trained, the first is step {missing[0]}"


def _of_ends(expected: dict[int, End], ends: Sequence[End]) -> Iterable[str]:
    for end in ends:
        for field in dataclasses.fields(End):
            value, wanted = getattr(end, field.name), getattr(expected[end.rank], field.name)
            if value != wanted:
                yield f"rank {end.rank}: {field.name} in the end is {value}, undisturbed {wanted}"
    missing = sorted(expected.keys() - {end.rank for end in ends})
    if missing:
        yield f"no result of ranks {', '.join(map(str, missing))}"

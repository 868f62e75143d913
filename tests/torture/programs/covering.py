"""Programs that cover all pairs of choices: greedy, one program after the other."""

from __future__ import annotations

import itertools
import random

from .parts import PARTS, Program, go_together, is_wanted

Choice = tuple[str, str]
Pair = tuple[Choice, Choice]

_TRIES = 30
_CHOICES = [(part, choice) for part, choices in PARTS.items() for choice in choices]
_FITTING = {
    one: frozenset(
        other for other in _CHOICES if other[0] != one[0] and go_together(one, other)
    )
    for one in _CHOICES
}  # fmt: skip


def pairs() -> set[Pair]:
    """All pairs of choices of two parts that are wanted, and that some program has."""
    r = random.Random(0)
    return {
        (one, other)
        for one, other in itertools.combinations(_CHOICES, 2)
        if other in _FITTING[one] and is_wanted(one, other) and complete([one, other], r, set())
    }


def covered(program: Program) -> set[Pair]:
    """The pairs of choices that a program has."""
    return set(itertools.combinations(program.items(), 2))


def complete(given: list[Choice], r: random.Random, wanted: set[Pair]) -> Program | None:
    """A program with these choices, and with as many wanted pairs as a greedy choice finds; `None`
    if there is none.
    """
    possible = {part: {(part, choice) for choice in choices} for part, choices in PARTS.items()}
    taken: list[Choice] = []
    for choice in given:
        if choice not in possible.pop(choice[0]):
            return None
        possible = {part: left & _FITTING[choice] for part, left in possible.items()}
        taken.append(choice)
    found = _extend(taken, possible, r, wanted)
    return None if found is None else {part: dict(found)[part] for part in PARTS}


def _extend(
    taken: list[Choice], possible: dict[str, set[Choice]], r: random.Random, wanted: set[Pair]
) -> list[Choice] | None:
    if not possible:
        return taken
    # The part with the fewest choices first: a dead end is found early.
    order = sorted(possible)
    r.shuffle(order)
    part = min(order, key=lambda name: len(possible[name]))
    choices = sorted(possible[part])
    r.shuffle(choices)
    choices.sort(
        key=lambda new: sum((old, new) in wanted or (new, old) in wanted for old in taken),
        reverse=True,
    )
    for choice in choices:
        left = {name: each & _FITTING[choice] for name, each in possible.items() if name != part}
        if all(left.values()) and (found := _extend([*taken, choice], left, r, wanted)):
            return found
    return None


def programs(seed: int = 0) -> list[Program]:
    """The programs, in the order in which they cover the most: each has a pair that is new."""
    r = random.Random(seed)
    left, found = pairs(), []
    while left:
        tries = [complete(list(r.choice(sorted(left))), r, left) for _ in range(_TRIES)]
        best = max((each for each in tries if each), key=lambda each: len(covered(each) & left))
        left -= covered(best)
        found.append(best)
    return found

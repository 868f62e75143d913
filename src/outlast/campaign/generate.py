"""The plans of a campaign's rounds: all from the seed, so that a round can be repeated; and the
shortest plan that still fails.

Kinds are dealt like cards: every kind comes as often as it should before any comes again. So do the
phases of each kind. Some faults come at the same step as the one before, on another rank: then the
second hits a job that is recovering.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from msgspec import structs

from outlast.campaign.plan import OF_HOSTS, Action, LauncherFault, RoundPlan
from outlast.chaos import Kind, Phase, PlannedFault

GAP_STEPS = 10
"""Steps between two faults, about twice those between two saves."""
_UNDISTURBED_STEPS = 20
"""At the end of a round: a save after the last fault."""
_TOGETHER = 0.2
"""The share of faults that come at the same step as the one before."""

_PHASES = (Phase.STEP, *Phase)
"""The phases of each kind; a step comes twice, since training is mostly steps."""
_ENDS_JOB = (Kind.SIGTERM, Action.STOP, Action.KILL_LAUNCHER)
"""A third as often as others: the next launcher starts all processes anew, which takes long."""
_HOSTS_EVERY, _HOSTS_FIRST = 12, 6
"""Every twelfth round is one on several hosts, beginning with the sixth."""
_HOSTS_FAULTS = 4
"""The faults of such a round: each takes about 20 s, while a lease expires and a host starts."""
_MOST_ITERATION = 5
"""The last iteration at whose entry a fault is planned."""
_OF_RANK_0 = Phase.COMMITTED
"""Only rank 0 commits."""

Card = Kind | Action
OF_SCRIPTS: tuple[Card, ...] = tuple(kind for kind in Kind if kind is not Kind.HANG_PYTHON)
"""The kinds for a script: all but what is found only after `ping_timeout`, ten minutes."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What the rounds of a campaign have in common."""

    ranks: int  # how many
    faults: int  # in each round
    # which ones; the names of kinds of fault plans and of actions on the launcher
    kinds: tuple[Card, ...] = (*Kind, *_ENDS_JOB[1:])
    known_steps: int | None = None  # of the training; by default as many as the faults need

    @property
    def steps(self) -> int:
        return self.known_steps or self.faults * GAP_STEPS + _UNDISTURBED_STEPS

    @property
    def gap(self) -> int:
        return max(1, (self.steps - _UNDISTURBED_STEPS) // self.faults)

    def with_steps(self, steps: int) -> Shape:
        """For a training of so many steps, which has no more faults than fit."""
        most = max(1, (steps - _UNDISTURBED_STEPS) // GAP_STEPS)
        return dataclasses.replace(self, faults=min(self.faults, most), known_steps=steps)


def parse_kinds(names: Sequence[str] = ()) -> tuple[Card, ...]:
    """The kinds of these names; all without names. A `ValueError` for an unknown name lists the
    known ones.
    """
    cards: dict[str, Card] = {str(card): card for card in (*Kind, *Action)}
    for name in names:
        if name not in cards:
            raise ValueError(f"unknown kind {name!r}; the kinds are: {', '.join(cards)}")
    return tuple(cards[name] for name in names) or tuple(cards.values())


def reference_plan(seed: int, shape: Shape) -> RoundPlan:
    """The undisturbed run."""
    return RoundPlan(seed=seed, number=0, ranks=shape.ranks, steps=shape.steps)


def plans(seed: int, shape: Shape) -> Iterator[RoundPlan]:
    """The plans of the rounds, numbered from 1, without end."""
    of_hosts = [card for card in shape.kinds if card in OF_HOSTS]
    inside = [card for card in shape.kinds if card not in OF_HOSTS]
    often = [card for card in inside if card not in _ENDS_JOB]
    deck = _deal(f"{seed}/kinds", (*inside, *often, *often))
    hosts = _deal(f"{seed}/hosts", of_hosts)
    phases = {card: _deal(f"{seed}/phases/{card}", _PHASES) for card in shape.kinds}
    number = 0
    while True:
        number += 1
        if of_hosts and (not inside or number % _HOSTS_EVERY == _HOSTS_FIRST):
            yield _plan_on_hosts(seed, number, shape, hosts)
            continue
        cards = [next(deck) for _ in range(shape.faults)]
        yield _plan(seed, number, shape, [(card, next(phases[card])) for card in cards])


def _plan_on_hosts(seed: int, number: int, shape: Shape, cards: Iterator[Card]) -> RoundPlan:
    draw = random.Random(f"{seed}/round/{number}")
    count = min(shape.faults, _HOSTS_FAULTS)
    apart = shape.steps // (count + 1)
    steps = [(index + 1) * apart - draw.randrange(GAP_STEPS) for index in range(count)]
    launcher = tuple(LauncherFault(Action(next(cards)), step) for step in steps)
    return structs.replace(reference_plan(seed, shape), number=number, launcher=launcher)


def _deal(seed: str, cards: Sequence[T]) -> Iterator[T]:
    cycle = 0
    while True:
        shuffled = list(cards)
        random.Random(f"{seed}/{cycle}").shuffle(shuffled)
        yield from shuffled
        cycle += 1


def _plan(seed: int, number: int, shape: Shape, cards: Sequence[tuple[Card, Phase]]) -> RoundPlan:
    draw = random.Random(f"{seed}/round/{number}")
    faults: list[PlannedFault] = []
    launcher: list[LauncherFault] = []
    for index, (card, phase) in enumerate(cards):
        step = index * shape.gap + draw.randrange(shape.gap)
        if isinstance(card, Action):
            launcher.append(LauncherFault(card, max(step, 1)))
            continue
        rank = draw.randrange(shape.ranks)
        if phase is Phase.ENTRY:
            # No step has been reported there; small, since a new launcher begins at iteration 0.
            iteration = draw.randint(1, _MOST_ITERATION)
            faults.append(PlannedFault(rank=rank, kind=card, iteration=iteration, phase=phase))
            continue
        if faults and faults[-1].step is not None and draw.random() < _TOGETHER:
            step = faults[-1].step
            rank = (faults[-1].rank + 1 + draw.randrange(max(shape.ranks - 1, 1))) % shape.ranks
        rank = 0 if phase is _OF_RANK_0 else rank
        faults.append(PlannedFault(rank=rank, kind=card, step=step, phase=phase))
    return RoundPlan(
        seed=seed,
        number=number,
        ranks=shape.ranks,
        steps=shape.steps,
        faults=tuple(faults),
        launcher=tuple(sorted(launcher, key=lambda one: one.step)),
    )


def shorten(items: Sequence[T], fails: Callable[[list[T]], bool], most_runs: int) -> list[T]:
    """Delta debugging (ddmin): a part of `items`, in their order, for which `fails` is true; if
    `most_runs` suffice, one of which no single item can be left out.

    Args:
        items: all of them together are known to fail.
        fails: whether these items fail. It should always answer the same for the same items; each
            part is tried only once.
    """
    current = list(range(len(items)))
    tried: dict[tuple[int, ...], bool] = {}

    def still_fails(part: list[int]) -> bool:
        key = tuple(part)
        if key not in tried:
            if len(tried) >= most_runs:
                return False
            tried[key] = fails([items[index] for index in part])
        return tried[key]

    parts = 2
    while len(current) >= 2:
        size = -(-len(current) // parts)
        chunks = [current[start : start + size] for start in range(0, len(current), size)]
        without = [[i for i in current if i not in chunk] for chunk in chunks]
        # With two chunks, each is the complement of the other.
        candidates = without if len(chunks) == 2 else [*chunks, *without]
        smaller = next((part for part in candidates if part and still_fails(part)), None)
        if smaller is not None:
            parts = 2 if len(smaller) <= size else max(parts - 1, 2)
            current = smaller
        elif parts >= len(current):
            break
        else:
            parts = min(2 * parts, len(current))
    return [items[index] for index in current]

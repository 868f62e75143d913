"""The round of a save in all orders of its store operations, and under mutations of its rules, each
of which the simulation must find.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from inprocess.mutations import mutate
from outlast.async_checkpoint.save import round as save_round
from outlast.async_checkpoint.save.round import SaveRound
from outlast.async_checkpoint.save.save import Save
from outlast.coordination.call_ledger import Round
from simulation.saves.rounds import Run
from simulation.saves.simulated_rank import KINDS, Call, SimulatedWait

SEEDS = 3_000
_CHUNK = 500


@pytest.fixture(autouse=True)
def simulated_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_round, "ThreadedWait", SimulatedWait)


def run(*calls: Call | tuple[Call, ...], **options: Any) -> Run:
    """One run; each rank makes one call, or several."""
    return Run(tuple(c if isinstance(c, tuple) else (c,) for c in calls), **options)


def pairs(kinds: Iterable[str], **options: Any) -> list[Run]:
    """Both ranks save the same step, or different ones, with every pair of kinds."""
    return [
        run(Call(7, one), Call(step, other), **options)
        for step in (7, 8)
        for one, other in itertools.product(kinds, repeat=2)
    ]


PREPARED = [
    run(Call(0, "prepare"), Call(0, "prepare")),
    run(Call(0, "prepare"), Call(7, "new")),
    run(Call(7), Call(0, "prepare")),
    run(Call(0, "prepare", indivisible=True), Call(0, "prepare")),
]
INDIVISIBLE = [
    run(Call(7, "new", indivisible=True), Call(7)),
    run(Call(7, indivisible=True), Call(7, "new")),
    run(Call(7, indivisible=True), Call(8, "new")),
]


def test_two_ranks_in_all_orders() -> None:
    states = sum(each.explorer.visit_all() for each in pairs(("same", "new")) + PREPARED)
    assert states > 5_000


@pytest.mark.slow
def test_two_ranks_of_which_one_fails_in_all_orders() -> None:
    for each in pairs(KINDS) + INDIVISIBLE:
        each.explorer.visit_all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        kinds if list(kinds) == sorted(kinds) else pytest.param(kinds, marks=pytest.mark.exhaustive)
        for kinds in itertools.product(KINDS, repeat=2)
    ],
    ids=" ".join,
)
@pytest.mark.exhaustive
def test_after_a_save_that_fails_the_next_one_succeeds(kinds: tuple[str, str]) -> None:
    for steps in ((7, 7), (7, 8)):
        calls = [(Call(s, k), Call(9)) for s, k in zip(steps, kinds, strict=True)]
        run(*calls).explorer.visit_all()


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(2))
def test_a_rank_drops_its_saves_at_any_moment(rank: int) -> None:
    for each in pairs(("same", "new", "new, cannot"), aborting=rank):
        each.explorer.visit_all()


@pytest.mark.slow
def test_a_rank_dies_at_any_moment() -> None:
    for each in pairs(("same", "new", "cannot", "new, cannot"), deaths=1):
        each.explorer.visit_all()


@pytest.mark.slow
def test_a_rank_comes_too_late_for_another() -> None:
    for each in pairs(("same", "new"), early=1):
        each.explorer.visit_all()


def test_a_rank_never_comes() -> None:
    for kind in ("same", "new"):
        for calls in (((), (Call(7, kind),)), ((Call(7, kind),), ())):
            run(*calls).explorer.visit_all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        ("same", "new", "same"),
        ("new", "same", "cannot"),
        pytest.param(("new", "new", "same"), marks=pytest.mark.exhaustive),
        pytest.param(("same", "new", "new"), marks=pytest.mark.exhaustive),
        pytest.param(("same", "same", "fails"), marks=pytest.mark.exhaustive),
        pytest.param(("same", "new", "fails"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
@pytest.mark.exhaustive
def test_three_ranks_in_all_orders(kinds: tuple[str, ...]) -> None:
    for steps in ((7, 7, 7), (7, 7, 8), (8, 7, 7), (7, 8, 9)):
        run(*(Call(s, k) for s, k in zip(steps, kinds, strict=True))).explorer.visit_all()


def drawn(seed: int) -> Run:
    """Two to four ranks and two saves, in which the seed decides what happens."""
    chance = random.Random(f"saves {seed}")
    size = chance.randint(2, 4)
    kinds = [chance.choice(KINDS) for _ in range(chance.randint(0, 2))]
    calls = [
        (
            Call(chance.choice((7, 7, 7, 8)), chance.choice(("same", "same", "new", *kinds))),
            Call(9, chance.choice(("same", "same", "new"))),
        )
        for _ in range(size)
    ]
    return run(
        *(made[: chance.choice((1, 2, 2, 2, 2, 2, 2, 2))] for made in calls),
        deaths=chance.choice((0, 0, 1)),
        early=chance.choice((0, 0, 1, 2)),
        aborting=chance.choice((None, None, chance.randrange(size))),
    )


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(_CHUNK, SEEDS, _CHUNK))],
)
@pytest.mark.exhaustive
def test_drawn_orders_of_more_ranks_and_saves(first: int) -> None:
    for seed in range(first, first + (_CHUNK if first else 50)):
        drawn(seed).explorer.follow(seed)


# Each: the function, a text in its source, and the replacement.
MUTATIONS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a rank that saves another step goes on": (
        SaveRound._announce,
        "raise self._failed() from None",
        "pass",
    ),
    "names are not compared": (Round.announce, 'if first["name"] == name:', "if True:"),
    "a structure that is new is not announced": (
        SaveRound._announce,
        "self._announcement.finish(parts)",
        "pass",
    ),
    "a structure that is not new is not announced": (
        SaveRound.begin,
        "self._announce(_SAME)",
        "pass",
    ),
    "a rank announces twice": (SaveRound.begin, "if not self._announced:", "if True:"),
    "one may be missing": (Round.finish, "< _size(", "+ 1 < _size("),
    "parts are divided before all have announced": (
        SaveRound._share_out,
        "if self._announcement.await_verdict(timeout_s).done:",
        "if True:",
    ),
    "a structure that is not new is taken for one": (
        SaveRound._share_out,
        'b"" if part == _SAME else part',
        "part",
    ),
    "a rank with a new structure does not learn of a failure": (
        SaveRound.agree,
        "if announcement.await_verdict(self._timeout_s).done:",
        "if True:",
    ),
    "a failure is not claimed in the announcement": (
        SaveRound.fail,
        "self._announcement.fail(failure)",
        "pass",
    ),
    "a failure is not claimed in the save": (
        SaveRound.fail,
        "self._save.fail(failure)",
        "self._announcement.fail(failure)",
    ),
    "a failure is claimed in the save first": (
        SaveRound.fail,
        "self._announcement.fail(failure)\n    return self._save.fail(failure)",
        "won = self._save.fail(failure)\n    self._announcement.fail(failure)\n    return won",
    ),
    "a failure of the announcement is not one of the save": (
        SaveRound._failed,
        "self._save.fail(failure)",
        "pass",
    ),
    "each rank raises the failure that it knows of": (
        SaveRound._failed,
        "failure = self._save.await_verdict(None).failure",
        "pass",
    ),
    "rank 0 does not say that there are no shares": (
        SaveRound._leave,
        "self._tell_shares({})",
        "pass",
    ),
    "an error of the division is lost": (
        SaveRound._listen,
        "self._leave(self.failure(e))",
        "pass",
    ),
    "rank 0 does not divide for the others": (SaveRound._listen, "self._share_out(None)", "pass"),
    "rank 0 forgets what its thread reads": (
        SaveRound.report,
        "self._listening.result()",
        "pass",
    ),
    "a rank that waits too long claims nothing": (
        SaveRound.report,
        "self.fail(self.failure(late + self._absent(save)))",
        "pass",
    ),
    "the announcements stay": (
        SaveRound.forget,
        "self._announcement.forget()",
        "pass",
    ),
    "a rank that has no snapshot does not say so": (
        Save.refuse,
        "self.round.refuse(error)",
        "pass",
    ),
    "a rank that fails reports a record": (
        SaveRound.report,
        "self.fail(outcome)",
        'save.finish(b"{}")',
    ),
    "a save that failed is committed": (Save.complete, "if failure is None:", "if True:"),
    "rank 0 does not tell the result": (Save.commit, "self.round.conclude(result)", "pass"),
}

SEARCHED = [
    *pairs(("same", "new")),
    *PREPARED,
    *INDIVISIBLE,
    *pairs(("new", "cannot", "new, cannot", "fails")),
    run(Call(7), ()),
    run(Call(7, "cannot"), Call(7, "new"), deaths=1),
    run(Call(7, "new"), Call(7, "cannot"), deaths=1),
    run(Call(7), Call(7, "cannot"), deaths=1),
    run(Call(7, "new"), Call(7, "cannot"), Call(7, "cannot")),
    run(Call(7), Call(7), early=1),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulation_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *MUTATIONS[name])
    with pytest.raises(AssertionError):
        for each in SEARCHED:
            each.explorer.visit_all()

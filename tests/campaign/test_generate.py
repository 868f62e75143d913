"""The plans of the rounds: the same for a seed, with all kinds in all phases on all ranks."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from outlast.campaign.generate import Shape, parse_kinds, plans, reference_plan
from outlast.campaign.plan import OF_HOSTS, Action, RoundPlan, hosts_for
from outlast.chaos import Kind, Phase
from outlast.errors import ChaosError

SHAPE = Shape(ranks=4, faults=20)


def first(count: int, seed: int = 0, shape: Shape = SHAPE) -> list[RoundPlan]:
    return list(islice(plans(seed, shape), count))


def test_a_seed_always_gives_the_same_plans() -> None:
    assert first(10) == first(10)
    assert first(10) != first(10, seed=1)


def test_every_kind_comes_before_any_comes_again() -> None:
    """Those that end the job once, all others three times."""
    kinds = [str(getattr(f, "kind", None) or f.action) for p in first(30) for f in p.all_faults]
    rare = {
        str(kind): kinds.count(str(kind))
        for kind in (Kind.SIGTERM, Action.STOP, Action.KILL_LAUNCHER)
    }
    often = {str(kind): kinds.count(str(kind)) for kind in Kind if kind is not Kind.SIGTERM}
    assert sum(rare.values()) + sum(often.values()) == len(kinds) == 600
    assert max(rare.values()) - min(rare.values()) <= 1
    assert max(often.values()) - min(often.values()) <= 3
    assert min(often.values()) + 3 >= 3 * max(rare.values())


def test_a_thousand_faults_have_every_kind_in_every_phase_and_on_every_rank() -> None:
    faults = [
        fault for plan in first(50) for fault in plan.faults if fault.kind is not Kind.SIGTERM
    ]
    kinds = set(Kind) - {Kind.SIGTERM}
    assert {(f.kind, f.phase) for f in faults} == {(k, p) for k in kinds for p in Phase}
    assert {(f.kind, f.rank) for f in faults} == {(k, r) for k in kinds for r in range(4)}


def test_an_entry_is_planned_by_its_iteration() -> None:
    """The step is not known there."""
    faults = [fault for plan in first(50) for fault in plan.faults]
    entries = [f for f in faults if f.phase is Phase.ENTRY]
    assert {(f.step, f.iteration) for f in entries} == {(None, k) for k in range(1, 6)}
    assert all(f.step is not None and f.iteration is None for f in faults if f not in entries)


def test_only_rank_0_commits() -> None:
    faults = [fault for plan in first(50) for fault in plan.faults]
    assert {f.rank for f in faults if f.phase is Phase.COMMITTED} == {0}


def test_some_faults_come_together_on_different_ranks() -> None:
    count = 0
    for plan in first(5):
        steps = [fault.step for fault in plan.faults if fault.step is not None]
        together = [
            (one, other)
            for one, other in zip(plan.faults, plan.faults[1:], strict=False)
            if one.step is not None
            and one.step == other.step
            and Phase.COMMITTED not in (one.phase, other.phase)
        ]
        assert steps == sorted(steps)
        assert all(one.rank != other.rank for one, other in together)
        count += len(together)
    assert count > 5


def test_a_round_ends_after_its_last_fault() -> None:
    for plan in first(20):
        assert all(0 <= (fault.step or 0) < plan.steps - 10 for fault in plan.all_faults)
        assert all(fault.step >= 1 for fault in plan.launcher)
    assert reference_plan(7, SHAPE).all_faults == ()
    assert reference_plan(7, SHAPE).steps == first(1)[0].steps


def test_only_the_chosen_kinds() -> None:
    shape = Shape(ranks=1, faults=8, kinds=parse_kinds(["hang", "stop"]))
    plan = first(1, shape=shape)[0]
    assert [fault.kind for fault in plan.faults] == [Kind.HANG] * 6
    assert [fault.action for fault in plan.launcher] == [Action.STOP] * 2
    with pytest.raises(ValueError, match=r"unknown kind 'explosion'; the kinds are: exception, "):
        parse_kinds(["explosion"])


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    for plan in (*first(5), reference_plan(3, SHAPE)):
        path = tmp_path / "plan.json"
        path.write_text(plan.to_json())
        assert RoundPlan.load(path) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "missing required field `seed`"),
        ('"seed": -1', r"Expected `int` >= 0 - at `\$\.seed`"),
        ('"faults": [{"rank": 0}]', r"missing required field `kind` - at `\$\.faults\[0\]`"),
        ('"ranks": 0', r"Expected `int` >= 1 - at `\$\.ranks`"),
        ('"faults": {"rank": 0}', r"Expected `array`, got `object` - at `\$\.faults`"),
        (
            '"faults": [{"rank": 2, "kind": "hang", "step": 1}]',
            r"faults\[0\]: field 'rank' is 2; with 2 ranks, it must be less than 2",
        ),
        (
            '"launcher": [{"action": "no"}]',
            r"'no' - at `\$\.launcher\[0\]\.action`; it must be one of: stop, kill_launcher, host_",
        ),
        (
            '"launcher": [{"action": "stop", "step": 1e999}]',
            r"Expected `int`, got `float` - at `\$\.launcher\[0\]\.step`",
        ),
        (
            '"launcher": [{"action": "stop", "at": 3}]',
            r"field `at` - at `\$\.launcher\[0\]`; it must be one of: action, step$",
        ),
        ('"launcher": 7', r"Expected `array`, got `int` - at `\$\.launcher`"),
        (
            '"launcher": [{"action": "host_lost", "step": 3}]',
            "2 ranks cannot be shared equally by 3 hosts or more",
        ),
        (
            '"launcher": [{"action": "host_lost", "step": 3}, {"action": "stop", "step": 5}]',
            "'host_lost' together with actions on a single launcher",
        ),
    ],
)
def test_an_invalid_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    valid = '"seed": 1, "number": 1, "ranks": 2, "steps": 9, "faults": [], "launcher": []'
    path.write_text(text if text.startswith("{") else f"{{{valid}, {text}}}")
    with pytest.raises(ChaosError, match=message) as raised:
        RoundPlan.load(path)
    assert str(path) in str(raised.value)


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChaosError, match=r"none\.json: cannot be read: No such file"):
        RoundPlan.load(tmp_path / "none.json")


def test_some_rounds_are_on_several_hosts() -> None:
    plans_of_a_campaign = first(24, shape=Shape(ranks=6, faults=40, kinds=parse_kinds([])))
    on_hosts = [plan for plan in plans_of_a_campaign if plan.hosts]
    assert [plan.number for plan in on_hosts] == [6, 18]
    for plan in on_hosts:
        assert plan.hosts == 3
        assert not plan.faults
        assert len({fault.action for fault in plan.launcher}) == len(plan.launcher) == 4
        assert [fault.step for fault in plan.launcher] == sorted(f.step for f in plan.launcher)
    assert {fault.action for plan in on_hosts for fault in plan.launcher} == set(OF_HOSTS)
    others = [fault for plan in plans_of_a_campaign if not plan.hosts for fault in plan.launcher]
    assert not any(fault.action in OF_HOSTS for fault in others)
    only = first(2, shape=Shape(ranks=6, faults=40, kinds=parse_kinds(["host_cut_off"])))
    assert {f.action for p in only for f in p.all_faults} == {Action.HOST_CUT_OFF}


@pytest.mark.parametrize(("ranks", "hosts"), [(1, 0), (2, 0), (3, 3), (4, 4), (6, 3), (8, 4)])
def test_the_hosts_share_the_ranks_equally(ranks: int, hosts: int) -> None:
    assert hosts_for(ranks) == hosts

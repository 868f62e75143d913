"""Fault plans: parsing, error messages, and random draws."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.chaos import Kind, Phase, Plan, PlannedFault, RandomFaults, fail_at
from outlast.chaos.plan import Moment
from outlast.errors import ChaosError

RANDOM = {"seed": 7, "rate_per_step": 0.01, "kinds": ["exception"], "max_faults": 5}


def at(
    rank: int = 0,
    iteration: int = 0,
    step: int = 0,
    seconds: float = 0.0,
    phase: Phase = Phase.STEP,
) -> Moment:
    return Moment(rank=rank, iteration=iteration, step=step, seconds=seconds, phase=phase)


def test_a_plan_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    faults = [
        {"rank": 1, "kind": "exception", "iteration": 0, "step": 20},
        {"rank": 2, "kind": "sigkill", "step": 60},
        {"rank": 0, "kind": "hang", "after_seconds": 3},
        {"rank": 0, "kind": "slow_disk", "phase": "writing", "seconds": 2},
    ]
    path.write_text(json.dumps({"faults": faults, "random": {**RANDOM, "ranks": [1, 2]}}))
    plan = Plan.load(path)
    assert plan.faults == (
        PlannedFault(rank=1, kind=Kind.EXCEPTION, iteration=0, step=20),
        fail_at(2, step=60, kind="sigkill"),
        fail_at(0, after_seconds=3.0, kind=Kind.HANG),
        PlannedFault(rank=0, kind=Kind.SLOW_DISK, phase=Phase.WRITING, seconds=2.0),
    )
    assert plan.random == RandomFaults(
        seed=7, rate_per_step=0.01, kinds=(Kind.EXCEPTION,), max_faults=5, ranks=(1, 2)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "plan: Expected `object`, got `array`"),
        ({}, "plan: no faults; give 'faults', 'random', or both"),
        ({"fault": []}, "unknown field `fault`; it must be one of: faults, random"),
        ({"faults": {}}, "plan: Expected `array`, got `object` - at `$.faults`"),
        ({"faults": [3]}, "Expected `object`, got `int` - at `$.faults[0]`"),
        ({"faults": [{"kind": "hang"}]}, "missing required field `rank` - at `$.faults[0]`"),
        ({"faults": [{"rank": 1}]}, "missing required field `kind` - at `$.faults[0]`"),
        (
            {"faults": [{"rank": 0, "kind": "hang"}, {"rank": -1, "kind": "hang"}]},
            "Expected `int` >= 0 - at `$.faults[1].rank`",
        ),
        ({"faults": [{"rank": True, "kind": "hang"}]}, "Expected `int`, got `bool`"),
        (
            {"faults": [{"rank": 1, "kind": "meteorite"}]},
            "'meteorite' - at `$.faults[0].kind`; it must be one of: exception, system_exit",
        ),
        ({"faults": [{"rank": 1, "kind": ["hang"]}]}, "got `array` - at `$.faults[0].kind`"),
        (
            {"faults": [{"rank": 1, "kind": "hang", "step": 1.5}]},
            "got `float` - at `$.faults[0].step`",
        ),
        (
            {"faults": [{"rank": 1, "kind": "hang", "after_seconds": "PT3S"}]},
            "Expected `float | null`, got `str` - at `$.faults[0].after_seconds`",
        ),
        (
            {"faults": [{"rank": 1, "kind": "hang", "after_seconds": float("nan")}]},
            "after_seconds must be finite, not nan - at `$.faults[0]`",
        ),
        (
            {"faults": [{"rank": 1, "kind": "hang", "setp": 1}]},
            "unknown field `setp` - at `$.faults[0]`; it must be one of: rank, kind, iteration",
        ),
        (
            {"faults": [{"rank": 1, "kind": "hang", "phase": "lunch"}]},
            "'lunch' - at `$.faults[0].phase`; it must be one of: step, entry, collective",
        ),
        (
            {"faults": [{"rank": 1, "kind": "sigkill", "seconds": 1}]},
            "kind 'sigkill' takes no 'seconds'; the kinds that do are: sigstop, ",
        ),
        (
            {"faults": [{"rank": 1, "kind": "slow_disk", "seconds": -1}]},
            "seconds must not be negative, not -1",
        ),
        (
            {"random": {**RANDOM, "rate_per_step": 2}},
            "Expected `float` <= 1.0 - at `$.random.rate_per_step`",
        ),
        (
            {"random": {**RANDOM, "kinds": []}},
            "Expected `array` of length >= 1 - at `$.random.kinds`",
        ),
        (
            {"random": {**RANDOM, "kinds": ["x"]}},
            "'x' - at `$.random.kinds[0]`; it must be one of: exception",
        ),
        (
            {"random": {**RANDOM, "ranks": [0, -1]}},
            "Expected `int` >= 0 - at `$.random.ranks[1]`",
        ),
        (
            {"random": {**RANDOM, "rate": 1}},
            "unknown field `rate` - at `$.random`; it must be one of: seed, rate_per_step, kinds",
        ),
        ({"random": {"seed": 1}}, "missing required field `rate_per_step` - at `$.random`"),
    ],
)
def test_errors_name_entry_field_and_allowed_values(values: Any, message: str) -> None:
    with pytest.raises(ChaosError) as caught:
        Plan.parse(values)
    assert message in str(caught.value)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ChaosError, match=r"plan\.json: cannot be read: No such file"):
        Plan.load(path)
    path.write_text('{"faults": [')
    with pytest.raises(ChaosError, match=r"plan\.json: not JSON"):
        Plan.load(path)
    path.write_text('{"faults": [{"rank": 1}]}')
    with pytest.raises(ChaosError, match=r"plan\.json: plan: .* `kind` - at `\$\.faults\[0\]`"):
        Plan.load(path)


@pytest.mark.parametrize("kind", [PlannedFault, RandomFaults, Plan])
def test_fields_are_given_by_name(kind: Any) -> None:
    with pytest.raises(TypeError, match="positional"):
        kind(1, Kind.HANG)


def test_all_conditions_must_hold() -> None:
    fault = fail_at(1, step=20, iteration=2, after_seconds=3.0)
    assert fault.due(at(1, 2, 20, 3.0))
    assert fault.due(at(1, 2, 25, 9.0))  # a later step and time count too
    assert not fault.due(at(0, 2, 20, 3.0))
    assert not fault.due(at(1, 3, 20, 3.0))
    assert not fault.due(at(1, 2, 19, 3.0))
    assert not fault.due(at(1, 2, 20, 2.9))
    assert fail_at(1).due(at(1))
    saving = fail_at(1, phase="save")
    assert saving.due(at(1, phase=Phase.SAVE))
    assert not saving.due(at(1))
    assert not fail_at(1).due(at(1, phase=Phase.SAVE))


kinds = st.sampled_from(Kind)
counts = st.none() | st.integers(0, 10**9)
faults = st.builds(
    PlannedFault,
    rank=st.integers(0, 10**6),
    kind=kinds,
    iteration=counts,
    step=counts,
    after_seconds=st.none() | st.floats(0, 1e9),
    phase=st.sampled_from(Phase),
)
timed_faults = st.builds(
    PlannedFault,
    rank=st.integers(0, 10**6),
    kind=st.sampled_from([kind for kind in Kind if kind.default_seconds is not None]),
    seconds=st.floats(0, 1e9),
)
randoms = st.builds(
    RandomFaults,
    seed=st.integers(0),
    rate_per_step=st.floats(0, 1),
    kinds=st.lists(kinds, min_size=1).map(tuple),
    max_faults=st.integers(0, 100),
    ranks=st.none() | st.lists(st.integers(0, 9), min_size=1).map(tuple),
)


@given(st.lists(faults | timed_faults, min_size=1).map(tuple), st.none() | randoms)
def test_json_round_trip(faults: tuple[PlannedFault, ...], random: RandomFaults | None) -> None:
    plan = Plan(faults=faults, random=random)
    assert Plan.parse(json.loads(plan.to_json())) == plan


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["faults", "random", "rank", "kind", "seed"]), inner)
    ),
)


@given(json_values)
def test_any_json_is_a_plan_or_a_clear_error(values: Any) -> None:
    with contextlib.suppress(ChaosError):
        assert Plan.parse(values).to_json()


@given(randoms, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_draws_are_reproducible(random: RandomFaults, rank: int, iteration: int, step: int) -> None:
    moment = at(rank, iteration, step)
    kind = random.draw(moment)
    assert kind == random.draw(moment)
    assert kind is None or kind in random.kinds
    if random.rate_per_step == 0 or (random.ranks is not None and rank not in random.ranks):
        assert kind is None


def test_draws_have_the_rate_and_use_every_kind() -> None:
    random = RandomFaults(seed=1, rate_per_step=0.1, kinds=(Kind.HANG, Kind.ABORT), max_faults=1)
    drawn = [random.draw(at(rank, 0, step)) for rank in range(4) for step in range(2500)]
    hits = [kind for kind in drawn if kind is not None]
    assert 900 < len(hits) < 1100
    assert set(hits) == set(random.kinds)
    other = RandomFaults(seed=2, rate_per_step=0.1, kinds=random.kinds, max_faults=1)
    assert drawn != [other.draw(at(rank, 0, step)) for rank in range(4) for step in range(2500)]


def test_every_fault_of_the_demo_can_fire() -> None:
    """Each fault costs one restart, so the demo's faults are those of consecutive iterations."""
    plan = Plan.load(Path(__file__).parents[2] / "examples" / "digits_faults.json")
    assert [fault.kind for fault in plan.faults] == [Kind.EXCEPTION, Kind.SIGKILL, Kind.HANG]
    assert [fault.iteration for fault in plan.faults] == [0, 1, 2]

"""Generated states come back as they were saved, or are refused by name; see `torture.states`."""

from __future__ import annotations

import math

import pytest
import torch

from torture.runner import run_trial
from torture.states.compare import difference
from torture.states.judge import make_case
from torture.states.trial import run_cases


def test_a_case_is_made_from_its_seed_alone() -> None:
    assert [str(make_case(seed)) for seed in range(50)] == [
        str(make_case(seed)) for seed in range(50)
    ]


@pytest.mark.parametrize("value", [torch.ones(3), {"a": 0.0}, [(1, 2)], torch.ones(()), {1: 2}])
def test_a_difference_is_found(value: object) -> None:
    others = [torch.zeros(3), {"a": -0.0}, [(1, 3)], torch.ones(1), {"1": 2}]
    found = [difference(value, each, loose=False) for each in others]
    assert all(found), found
    assert difference(value, value, loose=False) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_states_come_back_or_are_refused_by_name() -> None:
    result = run_cases(range(40), math.inf)
    assert not result.violations, "\n".join(result.violations[:5])
    assert result.tried > 100


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_trial_of_the_torture() -> None:
    report = run_trial("states", 3, 20.0, most=80)
    assert not report.violations, "\n".join(report.violations[:5])
    assert report.tried

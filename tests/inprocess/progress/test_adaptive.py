"""The adaptive timeout: what it learns from the gaps between pings."""

from __future__ import annotations

import datetime

from hypothesis import given
from hypothesis import strategies as st

from outlast.inprocess.timeouts import Adaptive, GapEstimator

FLOOR = Adaptive().floor.total_seconds()

gaps = st.lists(st.floats(1e-6, 100.0), min_size=1, max_size=200)


def learned(settings: Adaptive, seen: list[float]) -> GapEstimator:
    estimator = GapEstimator(settings)
    for gap in seen:
        estimator.observe(gap)
    return estimator


@given(gaps)
def test_the_limit_stays_within_its_bounds(seen: list[float]) -> None:
    settings = Adaptive()
    limit = learned(settings, seen).limit
    assert settings.floor.total_seconds() <= limit <= settings.initial.total_seconds()


@given(gaps)
def test_until_it_has_seen_enough_it_is_the_initial_one(seen: list[float]) -> None:
    settings = Adaptive(warmup=len(seen) + 1)
    assert learned(settings, seen).limit == settings.initial.total_seconds()


@given(st.lists(st.floats(1e-3, 10.0), min_size=10, max_size=64))
def test_a_gap_like_one_of_late_is_healthy(seen: list[float]) -> None:
    assert learned(Adaptive(), seen).limit >= min(60.0, 4.0 * max(seen))


@given(st.floats(1e-3, 5.0))
def test_a_hang_is_seen_in_a_few_steps(step: float) -> None:
    limit = learned(Adaptive(), [step] * 200).limit
    assert limit <= max(FLOOR, 4.0 * step) * 1.01


def test_it_forgets() -> None:
    estimator = learned(Adaptive(), [10.0] + [0.01] * 20)
    assert estimator.limit >= 40.0
    for _ in range(100):
        estimator.observe(0.01)
    assert estimator.limit == FLOOR


def test_its_bound_is_the_initial_timeout() -> None:
    settings = Adaptive(initial=datetime.timedelta(seconds=2))
    assert learned(settings, [1.5] * 50).limit == 2.0

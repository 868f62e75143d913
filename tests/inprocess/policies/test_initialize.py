"""RetryController ends the job at its limits, and names the limit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess.view_strategies import state_of
from outlast.errors import RestartAbort
from outlast.inprocess.initialize import Initialize, RetryController


@given(
    st.none() | st.integers(1, 5), st.integers(0, 5), st.integers(0, 5),
    st.integers(0, 6), st.integers(1, 6), st.integers(1, 6),
)  # fmt: skip
def test_it_goes_on_within_the_limits_only(
    max_iterations: int | None,
    min_size: int,
    min_active: int,
    iteration: int,
    size: int,
    active: int,
) -> None:
    controller = RetryController(max_iterations, min_size, min_active)
    state = state_of(0, size, iteration=iteration, active_world_size=active)
    within = max_iterations is None or iteration < max_iterations
    if within and size >= min_size and active >= min_active:
        assert controller(state) is state
    else:
        with pytest.raises(RestartAbort):
            controller(state)


def test_max_iterations_is_how_often_the_function_may_be_called() -> None:
    controller = RetryController(max_iterations=3)
    for iteration in range(3):
        controller(state_of(0, 1, iteration=iteration))
    with pytest.raises(RestartAbort, match=r"iteration 3 .* max_iterations=3"):
        controller(state_of(0, 1, iteration=3))


def test_it_names_every_limit_that_was_passed_with_its_values() -> None:
    controller = RetryController(max_iterations=2, min_world_size=8, min_active_world_size=6)
    state = state_of(3, 7, iteration=1, active_world_size=4)
    with pytest.raises(RestartAbort) as e:
        controller(state)
    assert str(e.value) == (
        "rank 3: RetryController: world size 7 is below min_world_size=8; "
        "active world size 4 is below min_active_world_size=6"
    )


def test_by_default_nothing_is_limited() -> None:
    controller = RetryController()
    assert isinstance(controller, Initialize)
    state = state_of(0, 1, iteration=10**6)
    assert controller(state) is state


@pytest.mark.parametrize("name", ["max_iterations", "min_world_size", "min_active_world_size"])
@pytest.mark.parametrize(
    ("value", "error"), [("3", TypeError), (1.5, TypeError), (True, TypeError), (-1, ValueError)]
)
def test_wrong_arguments_are_named(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{name} must be"):
        RetryController(**{name: value})


def test_no_iteration_at_all_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="max_iterations must be at least 1, not 0"):
        RetryController(max_iterations=0)


def test_what_does_not_define_the_call_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Initialize()  # type: ignore[abstract]

"""What `make gpu` tests, in its order: first what most users meet first. With one GPU, all of it
and the measurements take nine minutes at most; what needs several comes after that.
"""

from __future__ import annotations

import dataclasses

__all__ = ["MEASURED_S", "ONE_GPU", "ONE_GPU_S", "SEVERAL_GPUS", "Part"]

ONE_GPU_S = 520.0
"""For everything with one GPU."""
MEASURED_S = 110.0
"""Of that, what the tests leave to the measurements."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Tests that run in one process, for at most `limit_s`: one that hangs takes no other along."""

    name: str
    limit_s: float
    tests: tuple[str, ...]


def _part(name: str, limit_s: float, file: str, *tests: str) -> Part:
    path = f"tests/gpu/{file}.py"
    return Part(name, limit_s, tuple(f"{path}::{test}" for test in tests) or (path,))


ONE_GPU = (
    _part(
        "a fault in a collective",
        75,
        "test_first_day",
        "test_an_exception_in_a_collective",
        "test_a_kill_in_a_collective",
    ),
    _part(
        "a fault before the first collective",
        75,
        "test_first_day",
        "test_an_exception_before_the_first_collective",
    ),
    _part("checkpoints", 60, "test_checkpoints"),
    _part(
        "memory and contexts",
        60,
        "test_first_day",
        "test_a_kill_with_workers_of_a_loader_on_a_full_gpu",
        "test_no_context_is_left_on_the_first_gpu",
    ),
    _part("no rollback", 100, "test_live", "test_no_step_is_lost"),
    _part("a hung or lost GPU", 75, "test_nccl"),
    _part(
        "graphs, shards and groups",
        75,
        "test_first_day",
        "test_a_sharded_model",
        "test_a_captured_collective",
        "test_other_groups",
    ),
    _part("variables for debugging", 40, "test_first_day", "test_variables_for_debugging"),
    _part("200 aborts", 75, "test_first_day", "test_two_hundred_aborts_leave_nothing_behind"),
    _part(
        "no rollback, with the host ahead",
        60,
        "test_live",
        "test_no_step_is_lost_with_gloo",
        "test_the_other_host_is_ahead_of_gradients_that_never_come",
    ),
)

SEVERAL_GPUS = (_part("several GPUs", 400, "test_several"),)

"""Every call of the product that orders devices is needed: without it, a scenario fails.

A call that no scenario needs is either superfluous, or a race that no test would notice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import run
from late import orderings
from late.scenarios import scenarios
from late.trainings import ahead, check
from procs import Job

pytestmark = pytest.mark.slow
Ranks = Callable[..., Job]

NOT_ON_LATE = {
    "chaos/actions.py: _hang_collective: torch.accelerator.synchronize()":
        "a receive that is only queued, as NCCL's is; it never ends",
    "system/devices.py: Cuda.page_lock: torch.cuda.device(index)": "CUDA alone",
    "campaign/training.py: join_group: torch.accelerator.set_device_index(rank % count)":
        "it shares the devices among the ranks: on one for all, the results are the same",
    "compat/nvrx/shared_utils/inject_fault.py: _inject: "
    "torch.accelerator.set_device_index(device)": "it breaks the caller's device, and no other",
    "system/devices.py: Cuda.page_lock: torch.cuda.device(index) (2)": "CUDA alone",
    **{
        f"launch/health/device_checks.py: {call}": "the time of a copy, which is only printed"
        for call in (
            "_copied: _wait(name)",
            "_copied: _wait(name) (2)",
            "_wait: torch.accelerator.synchronize(torch.device(name))",
        )
    },
}  # fmt: skip
"""The calls that the device cannot show to be needed, and why."""

FIRST = {
    "async_checkpoint/calls": ["a_call_in_the_background_has_what_is_copied_from_any_device"],
    "inprocess/finalize.py": ["functions_in_threads_have_the_device_of_the_rank"],
    "inprocess/health_check.py: check_": ["an_error_of_a_device_stays"],
    "inprocess": ["a_health_check_waits_for_every_device_of_the_rank"],
    "system/devices.py: on_this": ["a_save_during_training"],
    "system/devices.py": ["an_error_of_a_device_stays"],
    "system/streams.py: has_": [
        "without_events",
        "times_of_events_are_tried_when_the_device_is_busy",
    ],
    "system/streams.py: HostEvent": ["without_events"],
    "system/streams.py: make_": ["without_events", "digests_are_of_the_state_after_the_step"],
    "system/streams.py: on_stream": ["digests_are_of_the_state_after_the_step"],
    "system/streams.py: recorded": [
        "copies_during_training_have_the_state_of_the_save",
        "without_events",
    ],
    "system/streams.py: wait_for": ["an_eager_save_waits_for_the_devices"],
    "async_checkpoint/snapshot/device_copy.py: DeviceCopy.run": [
        "an_eager_save_waits_for_the_devices",
        "an_error_in_an_eager_save_is_its_error",
    ],
    "async_checkpoint/snapshot/device_copy.py: DeviceCopy.call_off": [
        "an_interrupted_copy_has_ended_before_its_buffer_is_used_again"
    ],
    "async_checkpoint/snapshot/device_copy.py: _await_writes": [
        "an_interrupted_copy_has_ended_before_its_buffer_is_used_again"
    ],
    "async_checkpoint/snapshot/device_copy.py: DeviceCopy": ["an_eager_save_waits_for_the_devices"],
    "async_checkpoint/snapshot/device_copy.py: DeviceChunks.settle": [
        "a_copy_that_is_called_off_has_ended"
    ],
    "async_checkpoint/snapshot/device_copy.py": [
        "copies_during_training_have_the_state_of_the_save"
    ],
    "async_checkpoint/snapshot/snapshot.py: Snapshot.call_off": [
        "an_interrupted_copy_has_ended_before_its_buffer_is_used_again"
    ],
    "async_checkpoint/snapshot/snapshot.py": ["a_copy_that_is_called_off_has_ended"],
    "elastic/silent_faults/digests.py: SideStreams.hold": ["an_optimizer_waits_for_digests"],
    "elastic/silent_faults/digests.py": ["digests_are_of_the_state_after_the_step"],
    "elastic/silent_faults/finite_check.py: RunningFiniteCheck.step: self._losses": [
        "a_loss_is_read_without_a_wait"
    ],
    "elastic/silent_faults/finite_check.py: RunningFiniteCheck.check_all": [
        "the_losses_of_the_last_steps_are_read_at_the_end"
    ],
    "elastic/silent_faults/finite_check.py": [
        "parameters_that_are_not_finite_are_found_without_a_wait"
    ],
    "elastic/silent_faults/replica_check.py": ["an_optimizer_waits_for_digests"],
    "elastic/silent_faults/straggler_check.py": ["times_of_a_device_are_read_when_they_are_there"],
}
"""The scenarios that are tried first, by the beginning of the call; the first entry that fits."""


@pytest.mark.parametrize(("script", "scenario"), scenarios())
def test_scenario(ranks: Ranks, tmp_path: Path, script: str, scenario: str) -> None:
    with ranks(script, scenario, str(tmp_path / "f"), nprocs=1) as job:
        job.start_all()
        assert job.wait_all(120) == {0: 0}, job.errors(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ordering" in metafunc.fixturenames:
        # To find them takes seconds, of each process that collects tests.
        found = orderings.orderings() if metafunc.config.getoption("all") else []
        metafunc.parametrize("ordering", sorted({str(each) for each in found}))


@pytest.mark.exhaustive  # on a machine with a load of 10, two of them were not noticed each time
def test_without_it_a_scenario_fails(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, ordering: str
) -> None:
    if ordering in NOT_ON_LATE:
        pytest.skip(NOT_ON_LATE[ordering])
    if ordering.startswith("elastic/job/live/"):
        without = functools.partial(ranks, env={orderings.REMOVED: ordering})
        plan = {"optimizer": {"foreach": True}}
        with pytest.raises(AssertionError):  # `test_hosts_ahead_of_gradients_that_never_come`
            faulty = run(
                without, tmp_path / "c", *ahead("forward 5", "raise"), script="live", **plan
            )
            check(faulty, undisturbed(**plan), 4, sources=("live",))
        return
    first = next((names for start, names in FIRST.items() if ordering.startswith(start)), [])
    for number, (script, scenario) in enumerate(
        sorted(scenarios(), key=lambda each: each[1] not in first)
    ):
        folder = str(tmp_path / str(number))
        with ranks(script, scenario, folder, nprocs=1, env={orderings.REMOVED: ordering}) as job:
            job.start_all()
            if job.wait_all(120) != {0: 0}:
                assert "the package has no" not in job.errors(0)
                return
    raise AssertionError(f"no scenario fails without {ordering}")


def test_the_list_of_exceptions_is_of_today() -> None:
    assert set(NOT_ON_LATE) <= {str(each) for each in orderings.orderings()}

"""Calls in the background, health checks, and errors of the device `late`:
`python faults.py SCENARIO FOLDER`.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch
from torch import nn

import outlast
from late import device, scenario
from late.scenario import released_when_blocked, until_blocked
from outlast.async_checkpoint import (
    AsyncCallsQueue,
    AsyncRequest,
    Checkpointer,
)
from outlast.errors import CheckpointError, HealthCheckError, RankTimeout
from outlast.inprocess.finalize import ThreadedFinalize
from outlast.inprocess.health_check import DeviceHealthCheck, check_device_context
from outlast.inprocess.state import State

LATE = device.use()
PATH = sys.argv[2]
Path(PATH).mkdir(exist_ok=True)
SHORT = datetime.timedelta(seconds=0.2)


def state_of(rank: int, world_size: int) -> State:
    state = State()
    state.rank, state.world_size = rank, world_size
    return state


def a_call_in_the_background_has_what_is_copied_from_any_device() -> None:
    for persistent in (False, True):
        for number in (0, 1):
            queue = AsyncCallsQueue(persistent, nice=0)
            source = torch.ones(4096, device=f"late:{number}")
            target = torch.zeros(4096).pin_memory()
            path = f"{PATH}/{persistent}-{number}"
            with device.held(number) as gate:
                target.copy_(source, non_blocking=True)
                with released_when_blocked("_await_copies", gate):
                    queue.schedule_async_request(AsyncRequest(torch.save, (target, path), []))
                assert gate.is_released()
            queue.close()
            assert torch.equal(torch.load(path), torch.ones(4096))


def functions_in_threads_have_the_device_of_the_rank() -> None:
    seen = []
    torch.ones(1, device="late:1")
    torch.accelerator.set_device_index(1)
    finalize = ThreadedFinalize(
        datetime.timedelta(seconds=60),
        lambda: seen.append(torch.accelerator.current_device_index()),
    )
    finalize(state_of(0, 1))
    assert seen == [1]


def a_health_check_waits_for_every_device_of_the_rank() -> None:
    state = state_of(3, 4)
    tensors = [torch.ones(8, device=f"late:{number}") for number in (0, 1)]
    for number in (0, 1):
        with device.held(number):
            tensors[number].add_(1)
            check_device_context(3)  # work in progress is no error
            with pytest.raises(RankTimeout, match=r"rank 3: .*synchronizing with late:0, late:1"):
                DeviceHealthCheck(SHORT)(state)
    DeviceHealthCheck()(state)


def an_error_of_a_device_stays() -> None:
    state = state_of(3, 4)
    torch.ones(8, device="late:0")
    tensor = torch.ones(8, device="late:1")
    with device.held(1):
        LATE.fail(1, 0, "uncorrectable memory error")
        tensor.add_(1)
        check_device_context(3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="uncorrectable memory error"):
            DeviceHealthCheck()(state)
        with pytest.raises(HealthCheckError, match=r"rank 3: the LATE context .* on late:1"):
            check_device_context(3)


def an_error_in_an_eager_save_is_its_error() -> None:
    both = [torch.ones(4096, device=f"late:{number}") for number in (0, 1)]
    with Checkpointer(PATH) as checkpointer:
        checkpointer.save(1, {"p": both}).wait()
        with device.held(1) as gate:
            both[1].add_(1)
            LATE.fail(1, 0, "uncorrectable memory error")
            with (
                released_when_blocked("wait_for", gate),
                pytest.raises(RuntimeError, match=r"late:1: .*uncorrectable memory error"),
            ):
                checkpointer.save(2, {"p": both})
        with pytest.raises(RuntimeError, match=r"late:1: .*uncorrectable memory error"):
            checkpointer.save(4, {"p": both})  # it has failed before
        checks_the_earlier_checkpoint(checkpointer)


def an_error_in_an_overlapped_save_is_its_error() -> None:
    both = [nn.Parameter(torch.ones(4096, device=f"late:{number}")) for number in (0, 1)]
    optimizer = torch.optim.SGD(both, lr=1.0)
    with Checkpointer(PATH, overlap=optimizer) as checkpointer:
        checkpointer.save(1, {"p": both}).wait()
        with device.held(1) as gate:
            LATE.fail(1, 0, "uncorrectable memory error")
            handle = checkpointer.save(2, {"p": both})
            until_blocked("wait_for")
            gate.release()
            LATE.settle()
        with pytest.raises(CheckpointError, match=r"rank 0.*late:1: .*uncorrectable memory error"):
            handle.wait()
        checks_the_earlier_checkpoint(checkpointer)


def checks_the_earlier_checkpoint(checkpointer: Checkpointer) -> None:
    """It is the only one, and a save of what is not on the broken device works."""
    assert [each.step for each in checkpointer.checkpoints()] == [1]
    checkpointer.save(3, {"p": [torch.ones(4096, device="late:0"), torch.ones(4096)]}).wait()
    state = {"p": [torch.zeros(4096), torch.zeros(4096)]}
    checkpointer.restore(state, step=1)
    assert all(torch.equal(each, torch.ones(4096)) for each in state["p"])


def a_job_repeats_what_it_drew_on_the_device() -> None:
    """Dropout in steps after a restore; generators of two devices, on any stream."""
    LATE.set_delays(5, 500)
    expected = trained(f"{PATH}/whole", 6, 6)
    trained(f"{PATH}/parts", 3, 3)
    assert trained(f"{PATH}/parts", 6, 3) == expected[3:]


def trained(path: str, steps: int, every: int) -> list[str]:
    for index in (0, 1):  # other numbers than in the run before
        torch.late.default_generators[index].manual_seed(len(path) + every)
    torch.manual_seed(0 if every == steps else 1)
    first = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5)).to("late:0")
    second = nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 1)).to("late:1")
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    with outlast.Job(path, model=model, optimizer=optimizer, every=every) as job:
        job.restore()
        while job.steps < steps:
            x = torch.full((4, 8), float(job.steps + 1)).to("late:0")
            optimizer.zero_grad()
            loss = second(first(x).to("late:1")).square().mean()
            loss.backward()
            optimizer.step()
            job.step()
            losses.append(loss.item().hex())
    return losses


def figures_of_memory() -> None:
    late = torch.late
    late.reset_peak_memory_stats(1)
    before = late.memory_allocated(1)
    tensors = [torch.empty(1024, device="late:1") for _ in range(4)]
    del tensors[1:]
    assert late.memory_allocated(1) == before + 4096
    assert late.max_memory_allocated(1) == before + 4 * 4096
    late.reset_peak_memory_stats(1)
    assert late.max_memory_allocated(1) == before + 4096
    free, total = late.mem_get_info(1)
    assert total - free == late.memory_reserved(1) >= 4 * 4096


scenario.run(globals())

"""NCCL's part of a restart, with a stand-in for its process group: all groups are aborted at the
same time, and torch's watchdog is told not to end the process.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inprocess.view_strategies import state_of
from outlast.errors import HealthCheckError
from outlast.inprocess import CallWrapper, Wrapper
from outlast.inprocess.abort import AbortTorchDistributed
from outlast.inprocess.interruption import communicators
from outlast.system import devices
from outlast.system.backends import Backend

STATE = state_of(0, 1)
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}


class Communicator:
    """A collective of it blocks until it is aborted. An abort waits for that of its `partner`."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.partner = self
        self.error: RuntimeError | None = None

    def abort(self) -> None:
        self.aborted.set()
        assert self.partner.aborted.wait(60)
        if self.error is not None:
            raise self.error

    def all_reduce(self) -> None:
        assert self.aborted.wait(60)


class Group:
    """A process group with a communicator for CUDA tensors, or without one."""

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator

    group_name = "0"

    def _get_backend(self, device: torch.device) -> Communicator:
        assert device.type == "cuda"
        if self._communicator is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self._communicator


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[Communicator]:
    """Two communicators whose aborts wait for each other, and a group that has none."""
    first, second = Communicator(), Communicator()
    first.partner, second.partner = second, first
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    groups: Any = dist.distributed_c10d._world.pg_map
    for each in (first, None, second):
        monkeypatch.setitem(groups, Group(each), None)
    return [first, second]


def test_all_communicators_are_aborted_at_the_same_time(two: list[Communicator]) -> None:
    waiting = [threading.Thread(target=each.all_reduce) for each in two]
    for thread in waiting:
        thread.start()
    AbortTorchDistributed()(STATE)
    for thread in waiting:
        thread.join(60)
    communicators.await_aborts()
    assert not any(thread.is_alive() for thread in waiting)


def test_an_abort_that_fails_is_logged_and_the_restart_continues(
    two: list[Communicator], caplog: pytest.LogCaptureFixture
) -> None:
    two[0].error = RuntimeError("Future for ProcessGroup abort timed out")
    AbortTorchDistributed()(STATE)
    communicators.await_aborts()
    assert all(each.aborted.is_set() for each in two)
    assert "a communicator of the device could not be aborted" in caplog.text


def test_an_abort_that_does_not_end_is_an_error_of_the_rank(
    two: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "abort_s", 0.05)
    missing = two[0].partner = Communicator()
    AbortTorchDistributed()(STATE)
    with pytest.raises(HealthCheckError, match=r"abort of a process group .* 0 \(Communicator\)"):
        communicators.await_aborts()
    assert not communicators.can_be_destroyed()
    missing.aborted.set()
    communicators.await_aborts()
    assert communicators.can_be_destroyed()


def test_a_communicator_that_is_made_after_the_abort_is_aborted_too(
    two: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    abort = AbortTorchDistributed()
    abort(STATE)
    communicators.await_aborts()
    late = Communicator()
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, Group(late), None)  # type: ignore[arg-type]
    abort.again(STATE)
    assert late.aborted.wait(60)
    communicators.await_aborts()


def test_the_watchdog_does_not_end_a_process_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WATCHDOG:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as launchers set it

    @Wrapper()
    def train(call: CallWrapper) -> dict[str, str]:
        return {name: os.environ[name] for name in WATCHDOG}

    assert train() == WATCHDOG
    after = {name: os.environ.get(name) for name in WATCHDOG}
    assert after == dict.fromkeys(WATCHDOG) | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def test_what_the_user_has_set_for_the_watchdog_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    monkeypatch.delenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    @Wrapper()
    def train(call: CallWrapper) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL_")}

    assert train() == given


def test_the_wrapper_for_debugging_is_not_what_is_aborted(tmp_path: Path) -> None:
    """In torch 2.6 it has no `abort`: no group was aborted, and a fault became a hang."""
    level = dist.get_debug_level()  # type: ignore[attr-defined]
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
        )
        group = dist.distributed_c10d._get_default_group()
        wrapper = group._get_backend(torch.device("cpu"))
        assert wrapper is not wrapper.wrapped_pg
        found = devices.Accelerator("cpu").communicator(group)
        assert found is not None
        assert found.name == wrapper.wrapped_pg._get_backend_name()
    finally:
        dist.set_debug_level(level)  # type: ignore[attr-defined]
        dist.destroy_process_group()

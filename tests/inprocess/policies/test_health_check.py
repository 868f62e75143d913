"""Health checks: the device answers, and a rank has at most the allowed number of faults."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inprocess.view_strategies import state_of
from outlast.errors import FaultCounterExceeded, RankShouldRestart, RankTimeout
from outlast.inprocess.health_check import (
    CudaHealthCheck,
    DeviceHealthCheck,
    FaultCounter,
    HealthCheck,
)

STATE = state_of(2, 4)


class Gpus:
    """Replaces the current accelerator: four devices, of which this process uses some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, type: str = "cuda") -> None:
        self.type: str | None = type
        self.held = {0: 0, 1: 0, 2: 0, 3: 0}
        self.initialized = True
        self.current = 1
        self.synchronized: list[tuple[int, str]] = []
        self.blocked: threading.Event | None = None
        self.broken_at = -1
        module = torch.get_device_module(type)
        monkeypatch.setattr(module, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(module, "memory_reserved", self.memory_reserved)
        for name in ("current_accelerator", "set_device_index", "synchronize"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: self.current)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(self.held))

    def current_accelerator(self) -> torch.device | None:
        return None if self.type is None else torch.device(self.type)

    def set_device_index(self, device: int) -> None:
        assert device == self.current

    def memory_reserved(self, device: int) -> int:
        return self.held[device]

    def synchronize(self, device: int) -> None:
        if self.blocked:
            self.blocked.wait(60)
        if len(self.synchronized) == self.broken_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.synchronized.append((device, threading.current_thread().name))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def test_it_synchronizes_twice_in_a_thread_with_the_devices_in_use(gpus: Gpus) -> None:
    gpus.held[2] = gpus.held[3] = 1024
    fault = ValueError("train")
    assert CudaHealthCheck()(STATE, fault) == (STATE, fault)
    assert [device for device, _ in gpus.synchronized] == [2, 3, 2, 3]
    assert threading.current_thread().name not in {name for _, name in gpus.synchronized}


def test_without_memory_on_any_it_is_the_current_device(gpus: Gpus) -> None:
    CudaHealthCheck()(STATE)
    assert [device for device, _ in gpus.synchronized] == [1, 1]


def test_an_allocator_without_statistics_does(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_statistics(device: int) -> int:
        raise RuntimeError("pluggable allocator does not support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_reserved", no_statistics)
    CudaHealthCheck()(STATE)
    assert [device for device, _ in gpus.synchronized] == [1, 1]


def test_a_process_that_has_not_used_cuda_does_not_begin_to(gpus: Gpus) -> None:
    gpus.initialized = False
    assert CudaHealthCheck()(STATE) == (STATE, None)
    assert not gpus.synchronized


def test_without_an_accelerator_it_does_nothing(gpus: Gpus) -> None:
    gpus.type = None
    assert CudaHealthCheck()(STATE) == (STATE, None)
    assert not gpus.synchronized


def test_on_another_accelerator_the_check_for_all_runs_and_that_for_cuda_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = Gpus(monkeypatch, "xpu")
    assert CudaHealthCheck()(STATE) == (STATE, None)
    assert not devices.synchronized
    assert DeviceHealthCheck()(STATE) == (STATE, None)
    assert [device for device, _ in devices.synchronized] == [1, 1]
    devices.blocked = threading.Event()
    with pytest.raises(RankTimeout, match=r"rank 2: DeviceHealthCheck: .*xpu:1 "):
        DeviceHealthCheck(timeout=0.1)(STATE)
    devices.blocked.set()


def test_a_gpu_that_does_not_answer_is_named(gpus: Gpus) -> None:
    gpus.blocked = threading.Event()
    check = CudaHealthCheck(timeout=timedelta(seconds=0.1))
    with pytest.raises(RankTimeout, match=r"rank 2: .*cuda:1 .*timeout=0\.1 s"):
        check(STATE)
    gpus.blocked.set()


@pytest.mark.parametrize("broken_at", [0, 1])
def test_an_error_of_the_gpu_goes_up(gpus: Gpus, broken_at: int) -> None:
    gpus.broken_at = broken_at
    with pytest.raises(RuntimeError, match="illegal memory access"):
        CudaHealthCheck()(STATE)


@pytest.mark.parametrize(
    ("value", "error"),
    [("30", TypeError), (-30, ValueError), (None, TypeError), (timedelta(0), ValueError)],
)
def test_a_wrong_timeout_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^timeout must be"):
        CudaHealthCheck(value)


endings = st.sampled_from([None, ValueError("x"), RankShouldRestart(), KeyboardInterrupt()])


@given(st.none() | st.integers(0, 4), st.lists(endings, max_size=10))
def test_own_faults_are_counted_and_no_others(
    allowed: int | None, history: list[BaseException | None]
) -> None:
    counter = FaultCounter(allowed)
    assert isinstance(counter, HealthCheck)
    faults = 0
    for train_ex in history:
        own = isinstance(train_ex, ValueError | RankShouldRestart)
        faults += own
        if own and allowed is not None and faults > allowed:
            with pytest.raises(FaultCounterExceeded) as e:
                counter(STATE, train_ex)
            assert e.value.__cause__ is train_ex
            break
        assert counter(STATE, train_ex) == (STATE, train_ex)
    assert counter.faults == faults


def test_the_error_names_rank_and_numbers() -> None:
    counter = FaultCounter(max_rank_faults=1)
    counter(STATE, ValueError("first"))
    with pytest.raises(FaultCounterExceeded) as e:
        counter(state_of(5, 6, initial_rank=7), ValueError("second"))
    assert str(e.value) == (
        "rank 5 (initial rank 7) had 2 faults, more than max_rank_faults=1; "
        "the last one: ValueError('second')"
    )


@pytest.mark.parametrize(
    ("value", "error"), [("1", TypeError), (True, TypeError), (-1, ValueError)]
)
def test_a_wrong_limit_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^max_rank_faults must be"):
        FaultCounter(value)

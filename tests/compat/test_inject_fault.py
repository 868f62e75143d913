"""`inject_fault` of nvidia-resiliency-ext: which ranks, what it raises, and how a process ends."""

from __future__ import annotations

import faulthandler
import multiprocessing
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from outlast.compat.nvrx.inprocess.tools import inject_fault as tool

from outlast.compat.nvrx import inprocess, shared_utils

Fault = tool.Fault


def test_the_names_of_0_2_are_other_names_of_those_of_0_4() -> None:
    assert inprocess.tools.inject_fault is shared_utils.inject_fault is tool
    names = "GPU_ERROR GPU_SLEEP WORKLOAD_EXC ASYNC_EXC SIGNAL_EXC OS_ABORT LOCK_GIL SEGFAULT "
    assert [fault.name for fault in Fault] == f"{names}SIGINT SIGKILL SIGTERM SIGSTOP".split()
    for name in ("INT", "KILL", "TERM", "STOP"):
        assert Fault[name] is Fault[f"SIG{name}"]
    assert (Fault.GPU, Fault.ABORT, Fault.GIL) == (Fault.GPU_ERROR, Fault.OS_ABORT, Fault.LOCK_GIL)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tool, "dispatch_fault_injection", lambda *args: calls.append(args))
    return calls


def test_all_ranks_choose_the_same(
    monkeypatch: pytest.MonkeyPatch, dispatched: list[tuple[Any, ...]]
) -> None:
    chosen = set()
    monkeypatch.setenv("WORLD_SIZE", "4")
    for seed in range(40):
        hit = []
        for rank in range(4):
            monkeypatch.setenv("RANK", str(rank))
            tool.inject_fault((Fault.SIGKILL, Fault.SIGTERM), (1, 2), 1, (0.5, 1.0), seed)
            if dispatched:
                hit.append(rank)
                chosen.add(dispatched[-1][0])
                assert 0.5 <= dispatched[-1][1] <= 1.0
            assert len(set(dispatched)) <= 1
            last, dispatched[:] = dispatched[:], []
            assert len(last) <= 1
        assert 1 <= len(hit) <= 2
        assert 0 not in hit
    assert chosen == {Fault.SIGKILL, Fault.SIGTERM}


def test_numbers_instead_of_pairs_and_more_faults_than_ranks(
    monkeypatch: pytest.MonkeyPatch, dispatched: list[tuple[Any, ...]]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    tool.inject_fault([Fault.SIGINT], num_faults=5, keep_alive=1, delay=2, seed=0, callback=print)
    assert dispatched == [(Fault.SIGINT, 2, print)]


@pytest.fixture
def usr1() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("fault", [Fault.ASYNC_EXC, Fault.SIGNAL_EXC])
def test_an_exception_in_the_main_thread(fault: Any, usr1: None) -> None:
    called: list[int] = []

    def wait() -> None:
        tool.dispatch_fault_injection(fault, 0.05, lambda: called.append(1))
        until = time.monotonic() + 30
        while time.monotonic() < until:
            time.sleep(0.01)

    with pytest.raises(tool.InjectedException):
        wait()
    assert called == [1]


def test_an_exception_where_the_program_asks_for_it() -> None:
    for forget in (True, False):
        tool.dispatch_fault_injection(Fault.WORKLOAD_EXC, 0, None)
        assert tool._asked.wait(30)
        if forget:
            tool.clear_workload_exception()
            tool.maybe_raise_workload_exception()
    with pytest.raises(tool.InjectedException):
        tool.maybe_raise_workload_exception()
    tool.maybe_raise_workload_exception()


def test_an_unknown_fault_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="unknown fault: 'SIGKILL'"):
        tool.dispatch_fault_injection("SIGKILL", 0, None)


def _victim(name: str) -> None:
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tool.dispatch_fault_injection(Fault[name], 0.01, callback=None)
    time.sleep(60)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("SIGKILL", signal.SIGKILL),
        ("SIGTERM", signal.SIGTERM),
        ("OS_ABORT", signal.SIGABRT),
        ("SEGFAULT", signal.SIGSEGV),
    ],
)
def test_a_process_ends(name: str, number: int) -> None:
    process = multiprocessing.get_context("fork").Process(target=_victim, args=(name,))
    process.start()
    process.join(30)
    assert process.exitcode == -number

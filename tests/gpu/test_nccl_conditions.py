"""What is known to break with NCCL is told by name and version, once, and only where it is used;
what lets torch abort by itself keeps a job from believing its memory. NCCL is a stand-in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from outlast.inprocess import CallWrapper, Wrapper, nccl
from outlast.inprocess.nccl import CONDITIONS, Use, aborted_by_torch, warn_of_conditions
from outlast.system import devices

DOCS = Path(__file__).parents[2] / "docs" / "gpu.md"
NAMES = (
    "NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG",
    "NCCL_NET_PLUGIN",
    "NCCL_NVLS_ENABLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_USE_COMM_NONBLOCKING",
)
NOT_BLOCKING, LIMIT = "TORCH_NCCL_USE_COMM_NONBLOCKING", "TORCH_NCCL_NONBLOCKING_TIMEOUT"
SOUND = {"torch": (2, 13, 0), "nccl": (2, 29, 7)}


class Gpus(devices.Accelerator):
    """Devices with this version of NCCL."""

    def nccl_version(self) -> tuple[int, ...]:
        return (2, 28, 3)


class Group:
    """A process group, as far as torch's table of backends needs one."""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*NAMES, "LOCAL_RANK", "OUTLAST_REPLACEMENT"):
        monkeypatch.delenv(name, raising=False)
    nccl._warn.cache_clear()
    yield
    nccl._warn.cache_clear()


def with_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setitem(dist.distributed_c10d._world.pg_backend_config, Group(), backend)  # type: ignore[misc]


def in_words(use: Use) -> list[str]:
    return [each.when for each in CONDITIONS if each.holds(use)]


@pytest.mark.parametrize(
    ("environment", "backend", "aborts"),
    [
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "cuda:nccl", False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "cuda:nccl", True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, "cpu:gloo,cuda:nccl", True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, "cpu:gloo", False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "cuda:nccl", False),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "cuda:nccl", True),
        ({"TORCH_NCCL_BLOCKING_WAIT": "True"}, "cuda:nccl2", True),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, "cuda:nccl", False),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "cpu:gloo", False),
        ({"NCCL_BLOCKING_WAIT": "1"}, "cuda:nccl", True),
        ({"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}, "cuda:nccl", False),
        ({"TORCH_NCCL_DESYNC_DEBUG": "1"}, "cuda:nccl", False),
        ({}, "cuda:nccl", False),
    ],
)
def test_state_is_not_believed_if_torch_aborts_by_itself(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], backend: str, aborts: bool
) -> None:
    with_backend(monkeypatch, backend)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert bool(aborted_by_torch()) == aborts
    assert all(name in aborted_by_torch() for name in environment if aborts)


@pytest.mark.parametrize(
    ("environment", "detail", "ends"),
    [
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, False, True),
        ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}, False, True),
        ({"TORCH_NCCL_DESYNC_DEBUG": "1"}, False, True),
        ({"NCCL_DESYNC_DEBUG": "1"}, False, True),
        ({}, True, True),
        ({"TORCH_NCCL_DESYNC_DEBUG": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}, False, False),
        ({}, False, False),
    ],
)
def test_what_lets_torch_end_the_process_is_told(
    environment: dict[str, str], detail: bool, ends: bool
) -> None:
    use = Use(environment=environment, detail=detail, **SOUND)
    found = [each for each in CONDITIONS if each.holds(use)]
    assert [each.effect == nccl._ENDED for each in found] == [True] * ends


@pytest.mark.parametrize(
    ("torch_version", "version", "environment", "named"),
    [
        ((2, 13, 0), (2, 28, 2), {}, []),
        ((2, 13, 0), (2, 28, 3), {}, ["NCCL 2.28.3"]),
        ((2, 13, 0), (2, 28, 8), {}, ["NCCL 2.28.3"]),
        ((2, 13, 0), (2, 28, 9), {}, []),
        ((2, 7, 0), (2, 26, 2), {}, ["NCCL 2.26", "torch before 2.8"]),
        ((2, 7, 0), (2, 26, 2), {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}, ["torch before 2.8"]),
        ((2, 7, 1), (2, 26, 2), {}, ["torch before 2.8"]),
        ((2, 8, 0), (2, 26, 2), {NOT_BLOCKING: "1", LIMIT: "60"}, ["NCCL 2.26"]),
        ((2, 13, 0), (2, 29, 7), {NOT_BLOCKING: "1"}, [f"`{NOT_BLOCKING}=1` without `{LIMIT}`"]),
        ((2, 8, 0), (2, 25, 1), {}, ["NCCL 2.25"]),
        ((2, 6, 0), (2, 21, 5), {}, ["NCCL before 2.24.1", "torch before 2.8"]),
        ((2, 6, 0), (2, 21, 5), {"NCCL_NET_PLUGIN": "none"}, ["torch before 2.8"]),
        ((2, 13, 0), (), {}, []),  # RCCL
    ],
)
def test_versions(
    torch_version: tuple[int, ...],
    version: tuple[int, ...],
    environment: dict[str, str],
    named: list[str],
) -> None:
    found = in_words(Use(torch_version, version, environment))
    assert len(found) == len(named)
    assert all(each.startswith(name) for each, name in zip(found, named, strict=True))


def test_nvlink_sharp_is_named_unless_it_is_off() -> None:
    (found,) = in_words(Use(environment={}, nvls=True, **SOUND))
    assert "NVLink SHARP" in found
    assert not in_words(Use(environment={"NCCL_NVLS_ENABLE": "0"}, nvls=True, **SOUND))


def test_the_page_has_the_table() -> None:
    lines = DOCS.read_text().splitlines()
    at = lines.index("| where | what happens | what to do | source |")
    rows = [
        f"| {each.when} | {each.effect} | {each.remedy} | [source]({each.source}) |"
        for each in CONDITIONS
    ]
    assert lines[at + 2 : at + 2 + len(rows)] == rows
    assert not lines[at + 2 + len(rows)].startswith("|")


def test_a_wrapped_call_that_uses_nccl_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "in_use", lambda: Gpus("cpu"))
    told = threading.Event()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: told.set())
    nccl.log.addHandler(handler)

    @Wrapper()
    def train(call: CallWrapper) -> bool:
        with_backend(monkeypatch, "cuda:nccl")
        return told.wait(60)

    try:
        assert train()
    finally:
        nccl.log.removeHandler(handler)
    with_backend(monkeypatch, "cuda:nccl")
    warn_of_conditions()
    (found,) = [each for each in caplog.messages if "NCCL" in each]
    version = torch.__version__.partition("+")[0]
    assert found.startswith(f"torch {version}, NCCL 2.28.3: NCCL 2.28.3 to 2.28.8: ")
    assert found.endswith("(https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/README.md)")


@pytest.mark.parametrize(
    ("backend", "environment", "has_device"),
    [
        ("cpu:gloo", {}, True),
        ("cuda:nccl", {}, False),
        ("cuda:nccl", {"LOCAL_RANK": "1"}, True),
        ("cuda:nccl", {"OUTLAST_REPLACEMENT": "1"}, True),
    ],
)
def test_nothing_is_said_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: str,
    environment: dict[str, str],
    has_device: bool,
) -> None:
    with_backend(monkeypatch, backend)
    monkeypatch.setattr(devices, "in_use", lambda: Gpus("cpu") if has_device else None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    warn_of_conditions()
    assert not caplog.records

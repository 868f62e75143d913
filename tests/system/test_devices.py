"""Accelerators: what serves a type of device, and no other module that speaks to a particular type.
With XPUs as stand-ins, of which torch's module exists in every build.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outlast
from outlast.elastic import random_generators
from outlast.system import devices
from outlast.system.devices import Accelerator, Cuda

SOURCE = Path(outlast.__file__).parent
OWN = SOURCE / "system" / "devices.py"


def particular(tree: ast.AST) -> Iterator[int]:
    """The lines that speak to CUDA alone: `torch.cuda`, `is_cuda`, `cuda()`, imports, a type."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found = node.attr in ("cuda", "is_cuda", "xpu", "is_xpu", "mps", "npu")
        elif isinstance(node, ast.Import):
            found = any(alias.name.startswith("torch.cuda") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = str(node.module)
            names = {alias.name for alias in node.names}
            found = module.startswith("torch.cuda") or (module == "torch" and "cuda" in names)
        else:
            value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
            found = isinstance(value, str) and value.split(":")[0] in ("cuda", "torch.cuda")
        if found:
            yield getattr(node, "lineno", 0)


@pytest.mark.slow
def test_no_other_module_speaks_to_a_particular_type_of_device() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        if path != OWN
        for line in particular(ast.parse(path.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "tensor.is_cuda",
        "tensor.cuda()",
        "import torch.cuda.amp",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "device = 'cuda:1'",
        "device == 'cuda'",
    ],
)
def test_what_that_finds(line: str) -> None:
    assert list(particular(ast.parse(line)))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_registered", dict(devices._registered))


class Xpus:
    """The current accelerator: two XPUs, of which the second is the current device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.initialized = True
        self.available = True
        self.states = [torch.tensor([i], dtype=torch.uint8) for i in range(2)]
        of_torch: dict[str, Callable[..., Any]] = {
            "current_accelerator": lambda: torch.device("xpu"),
            "is_available": lambda: self.available,
            "current_device_index": lambda: 1,
            "device_count": lambda: 2,
        }
        for name, function in of_torch.items():
            monkeypatch.setattr(torch.accelerator, name, function)
        monkeypatch.setattr(torch.xpu, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.xpu, "get_rng_state", lambda index: self.states[index].clone())
        monkeypatch.setattr(torch.xpu, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state


@pytest.fixture
def xpus(monkeypatch: pytest.MonkeyPatch) -> Xpus:
    return Xpus(monkeypatch)


def test_every_type_is_served(registered: None) -> None:
    assert type(devices.of("cuda")) is Cuda
    for name in ("xpu", "npu", "mps", "late"):
        assert type(devices.of(name)) is Accelerator
        assert devices.of(name).type == name


def test_a_registered_one_serves_its_type_and_no_other(registered: None, xpus: Xpus) -> None:
    class Own(Accelerator):
        pass

    own = Own("xpu")
    devices.register(own)
    assert devices.of("xpu") is devices.current() is devices.available() is devices.in_use() is own
    assert type(devices.of("npu")) is Accelerator
    assert type(devices.of("cuda")) is Cuda


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_there_is_none() -> None:
    assert devices.available() is devices.in_use() is devices.device_in_use() is None
    assert not devices.on_accelerator(torch.ones(1))
    assert random_generators.of_devices() == {}


def test_without_a_device_torch_2_6_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    assert devices.current() is None


def test_a_process_that_has_not_used_a_device(xpus: Xpus) -> None:
    xpus.initialized = False
    assert devices.in_use() is devices.device_in_use() is None
    assert devices.available() is not None
    xpus.available = False
    assert devices.available() is None
    assert devices.current() is not None


def test_the_current_device_of_this_thread(xpus: Xpus) -> None:
    assert devices.device_in_use() == torch.device("xpu", 1)


def test_tensors_on_no_device_or_another_one(xpus: Xpus) -> None:
    assert not devices.on_accelerator(torch.ones(1))
    assert not devices.on_accelerator(torch.ones(1, device="meta"))


def test_a_type_without_statistics_of_memory_holds_the_current_device(
    xpus: Xpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda index: 1 - index)
    assert devices.of("xpu").held() == [0]
    monkeypatch.delattr(torch.xpu, "memory_reserved")
    assert devices.of("xpu").held() == [1]


def test_a_thread_is_on_the_device_with_memory(xpus: Xpus, monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[int] = set()
    set_to: list[int] = []
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda index: 1024 * (index in held))
    monkeypatch.setattr(torch.accelerator, "set_device_index", set_to.append)
    for has, expected in (set(), 1), ({0}, 0), ({0, 1}, 1):
        held = has
        assert devices.on_this_device(int)("7") == 7
        assert set_to.pop() == expected
    xpus.initialized = False
    assert devices.on_this_device(int) is int


def test_a_type_without_page_locks_has_none(xpus: Xpus) -> None:
    assert devices.of("xpu").page_lock(0, 4096, 0) is None


def test_states_of_generators_by_device(xpus: Xpus) -> None:
    saved = random_generators.of_devices()
    assert {name: int(state) for name, state in saved.items()} == {"xpu:0": 0, "xpu": 1}
    xpus.states = [torch.tensor([7], dtype=torch.uint8) for _ in range(2)]
    random_generators.set_all(saved)
    assert [int(state) for state in xpus.states] == [0, 1]


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "xpu:1", "xpu:2"])
def test_a_state_of_another_device_is_skipped(xpus: Xpus, name: str) -> None:
    random_generators.set_all({name: torch.tensor([7], dtype=torch.uint8)})
    assert [int(state) for state in xpus.states] == [0, 1]


@pytest.mark.slow
def test_imports_initialize_nothing() -> None:
    program = (
        "import torch; torch.accelerator.current_accelerator = torch.cuda._lazy_init = None\n"
        "import outlast.inprocess, outlast.elastic, outlast.async_checkpoint, outlast.chaos\n"
        "import outlast.system.devices, outlast.system.streams, outlast.inprocess.abort\n"
        "import outlast.inprocess.health_check, outlast.elastic.numerics.consistent_ddp\n"
        "print(torch.cuda.is_initialized(), torch.xpu.is_initialized())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "False False\n", run.stderr

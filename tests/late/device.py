"""The device `late`: builds the extension once for a version of torch, and registers it.

from late import device

device.use()                      # torch.device("late") works from now on, in this process
with device.held() as stream:     # what is queued on the current stream waits for the end
    ...
dist.init_process_group("cpu:gloo,late:lategloo")   # see cpp/group.cpp
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

DELAYS = "LATE_DELAYS"
"""In the environment of a process: `SEED:LONGEST_US`."""
WITHOUT = "LATE_WITHOUT"
"""In the environment of a process: an optional hook that the device lacks. One of `pinned memory`,
`streams`, `events`, `times` (of events), `queries` (of streams), `generators` and `figures` (of
memory), which raise as in torch's base classes; or are no functions of `torch.late`.
"""
_FUNCTIONS_OF = {
    "generators": ("get_rng_state", "set_rng_state", "default_generators"),
    "figures": ("memory_allocated", "max_memory_allocated", "memory_reserved", "mem_get_info"),
}

_SOURCES = Path(__file__).with_name("cpp")
_BUILT = Path(__file__).parents[2] / "build" / "late"
_FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-O0", "-Wall", "-Werror"]


class NoCompilerError(RuntimeError):
    """The extension is not built, and this machine cannot build it."""


def use() -> ModuleType:
    """Builds the extension if that was not done, and makes `late` a device type of torch. Returns
    the module with what only tests ask of a device.
    """
    return _registered()


@functools.cache
def _registered() -> ModuleType:
    extension = _loaded(built())
    torch.utils.rename_privateuse1_backend("late")
    extension.register_hooks()
    torch._register_device_module("late", _device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("lategloo", _new_group, devices=["late"])
    if delays := os.environ.get(DELAYS):
        seed, longest_us = delays.split(":")
        extension.set_delays(int(seed), int(longest_us))
    atexit.register(extension.stop)
    return extension


def _new_group(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    of_gloo = dist.PrefixStore("gloo", store)
    gloo = dist.ProcessGroupGloo(of_gloo, rank, size, timeout=timeout)
    return _registered().new_group(gloo, store)


def _device_module(extension: ModuleType) -> ModuleType:
    """`torch.late`, with the functions that torch calls, and those of other device modules."""
    module = ModuleType("torch.late")

    def generator(device: Any = "late") -> DefaultGenerator:
        return default_generators[index_of(device)]

    def manual_seed_all(seed: int) -> None:
        for each in default_generators:
            each.manual_seed(seed)

    def index_of(device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return int(extension.current_device() if index is None else index)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        total = int(extension.arena_bytes())
        return total - extension.reserved_bytes(index_of(device)), total

    default_generators = tuple(
        DefaultGenerator(extension, index) for index in range(extension.device_count)
    )
    contents = {
        "default_generators": default_generators,
        "is_available": lambda: True,
        "is_initialized": extension.in_use,
        "_is_in_bad_fork": extension.forked,
        "device_count": lambda: extension.device_count,
        "current_device": extension.current_device,
        "set_device": lambda device: extension.set_device(torch.device("late", device).index),
        "current_stream": lambda device=None: torch.accelerator.current_stream(device),
        "Stream": functools.partial(torch.Stream, "late"),
        "Event": functools.partial(torch.Event, "late"),
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "synchronize": lambda device=None: torch.accelerator.synchronize(device),
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device="late": generator(device).get_state(),
        "set_rng_state": lambda state, device="late": generator(device).set_state(state),
        "initial_seed": lambda: generator().initial_seed(),
        "memory_allocated": lambda device=None: extension.allocated_bytes(index_of(device)),
        "max_memory_allocated": lambda device=None: extension.peak_bytes(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak(index_of(device)),
        "memory_reserved": lambda device=None: extension.reserved_bytes(index_of(device)),
        "mem_get_info": mem_get_info,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    lacking = os.environ.get(WITHOUT)
    for name, value in contents.items():
        if name in _FUNCTIONS_OF.get(lacking or "", ()):
            continue
        setattr(module, name, value)
    return module


class DefaultGenerator:
    """The default random generator of one device."""

    def __init__(self, extension: ModuleType, index: int) -> None:
        self._extension = extension
        self._index = index

    def manual_seed(self, seed: int) -> DefaultGenerator:
        self._extension.seed_default(self._index, seed)
        return self

    def initial_seed(self) -> int:
        return int(self._extension.default_seed(self._index))

    def get_state(self) -> torch.Tensor:
        return torch.frombuffer(
            bytearray(self._extension.default_state(self._index)), dtype=torch.uint8
        )

    def set_state(self, state: torch.Tensor) -> None:
        self._extension.set_default_state(self._index, state.cpu().numpy().tobytes())


@contextlib.contextmanager
def held(device: int | None = None) -> Iterator[Any]:
    """What is queued on the current stream of this thread waits until the block ends, or until
    the gate that it returns is released.
    """
    extension = use()
    index = extension.current_device() if device is None else device
    gate = extension.hold(index, extension.current_stream(index))
    try:
        yield gate
    finally:
        gate.release()


@contextlib.contextmanager
def held_beside(device: int = 0) -> Iterator[Any]:
    """The same for all streams of a device but the default one."""
    extension = use()
    gates = [extension.hold(device, stream) for stream in range(1, extension.pool_size + 1)]
    try:
        yield
    finally:
        for gate in gates:
            gate.release()


@functools.cache
def built() -> Path:
    """The file of the extension. Only one process builds it, and the others wait."""
    folder = _BUILT / _version()
    done = folder / "_late.so"
    if done.exists():
        return done
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler is None or not headers.exists():
        raise NoCompilerError("no C++ compiler, or no headers of Python")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _build(compiler, folder)
    return done


def _version() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"torch{torch.__version__}-python{python}-{digest.hexdigest()[:12]}"


def _build(compiler: str, folder: Path) -> None:
    from torch.utils import cpp_extension  # imports setuptools

    # One translation unit: torch's headers take longer to read than everything else together.
    sources = "".join(f'#include "{source}"\n' for source in sorted(_SOURCES.glob("*.cpp")))
    flags = [*_FLAGS, f"-I{sysconfig.get_paths()['include']}", "-DAT_PER_OPERATOR_HEADERS"]
    flags += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-ltorch", "-ltorch_cpu", "-lc10", "-lpthread"]
    partial = folder / "_late.partial"
    subprocess.run(
        [compiler, *flags, "-shared", "-x", "c++", "-", *libraries, "-o", str(partial)],
        input=sources.encode(),
        check=True,
    )
    partial.rename(folder / "_late.so")


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_late", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

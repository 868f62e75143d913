"""Accelerators: the one module that speaks to a particular type of device.

The rest of the package uses `torch.accelerator`, `torch.Stream` and `torch.Event`. What these do
not offer is a method of `Accelerator`. It serves every type of device (XPU, NPU, HPU, ...) through
the module that torch has for it, such as `torch.xpu`. `Cuda` serves NVIDIA's and AMD's GPUs, which
are both `cuda` in torch. To serve another type in its own way, `register` a subclass.

A process uses at most one type, the one that torch calls the current accelerator. Tensors on other
devices are copied as by `Tensor.copy_`, without streams. What a type may lack (`optional_hooks`) is
replaced, above all in `streams.py`: where there is one stream only (MPS), the copies of an
overlapped save and the checks of replicas take their turn in it.

Nothing here initializes a device, unless a method says that it does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from outlast.system.backends import Backend
from outlast.system.optional_hooks import has

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("outlast.devices")

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices of this process


class Accelerator:
    """The operations on one type of device (`torch.device.type`), by what every type offers."""

    def __init__(self, type: str) -> None:
        self.type = type

    @property
    def module(self) -> Any:
        """Torch's module for the type. It must have `device_count` and `is_available`, no more."""
        return torch.get_device_module(self.type)

    @property
    def is_initialized(self) -> bool:
        """Whether this process has used a device. A type that cannot tell is used if available."""
        return bool(getattr(self.module, "is_initialized", self.module.is_available)())

    def held(self) -> list[int]:
        """The devices on which this process has memory; the current one if none or not known."""
        found: list[int] = []
        reserved = getattr(self.module, "memory_reserved", None)
        if reserved is not None:
            with contextlib.suppress(RuntimeError):  # a pluggable allocator may have no statistics
                found = [i for i in range(torch.accelerator.device_count()) if reserved(i)]
        return found or [torch.accelerator.current_device_index()]

    def check(self, index: int) -> None:
        """Raises torch's `RuntimeError` if this process cannot use the device any more. Does not
        wait for the device: work in progress is no error. On a type whose errors do not stay, or
        are not reported by a stream, it finds nothing.
        """
        default_stream = getattr(self.module, "default_stream", torch.accelerator.current_stream)
        errors_are_found = has(
            self.type,
            "queries of streams",
            lambda: default_stream(index).query(),
            "an error of a device that stays is found only when the device is used",
        )
        if errors_are_found:
            default_stream(index).query()

    def communicator(self, group: Any) -> Backend | None:
        """The backend that a process group has for the type; `None` if it has none that can abort
        its collectives.
        """
        try:
            backend = group._get_backend(torch.device(self.type))
        except RuntimeError:
            return None
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it; the wrapper of torch 2.6 has no `abort`.
        backend = getattr(backend, "wrapped_pg", backend)
        return Backend(backend) if hasattr(backend, "abort") else None

    def nccl_version(self) -> tuple[int, ...]:
        """The version of NCCL in this process; empty if this type does not use it."""
        return ()

    def may_have_nvls(self) -> bool:
        """Whether NCCL may use NVLink SHARP on the devices, as far as their type tells."""
        return False

    def page_lock(self, address: int, size_bytes: int, index: int) -> Callable[[], None] | None:
        """Page-locks memory, so that devices copy into it at full speed, in the background. Without
        it copies are slower but correct, so an error is only logged. `index` is any device that
        this process uses: the current one may be different in a thread of this package, where the
        call would create a context on device 0.

        Returns what ends it, before the memory is freed, while no copy into it is in progress.
        `None` if it failed, or if the type cannot page-lock memory that it has not allocated
        itself.
        """
        return None

    @property
    def has_generators(self) -> bool:
        """Whether the state of a random generator can be read; initializes the current device."""
        return has(
            self.type,
            "random generators",
            lambda: self.random_state(torch.accelerator.current_device_index()),
            "what a program draws there is not repeated after a restart",
        )

    def random_state(self, index: int) -> torch.Tensor:
        """The state of a device's random generator; initializes the device."""
        state: torch.Tensor = self.module.get_rng_state(index)
        return state

    def set_random_state(self, index: int, state: torch.Tensor) -> None:
        """Sets it; initializes the device."""
        self.module.set_rng_state(state, index)

    def seeded(self, index: int, seed: int) -> torch.Tensor:
        """The state of a generator with this seed; initializes the device."""
        device = torch.device(self.type, index)
        return torch.Generator(device).manual_seed(seed).get_state()


class Cuda(Accelerator):
    """GPUs of NVIDIA, and of AMD by ROCm."""

    def nccl_version(self) -> tuple[int, ...]:
        # ROCm has RCCL, whose versions tell nothing about NCCL's. A suffix is left out.
        return () if torch.version.hip else torch.cuda.nccl.version()[:3]

    def may_have_nvls(self) -> bool:
        return not torch.version.hip and torch.cuda.get_device_capability() >= (9, 0)

    def page_lock(self, address: int, size_bytes: int, index: int) -> Callable[[], None] | None:
        with torch.cuda.device(index):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))
            if code:
                # The next kernel of the training would report CUDA's last error as its own: a
                # kernel here reports it instead.
                with contextlib.suppress(RuntimeError):
                    torch.empty(1, device=torch.device(self.type, index)).fill_(0)
                log.info(
                    "a snapshot buffer of %d bytes could not be page-locked (CUDA error %d): "
                    "copies from the GPU are slower",
                    size_bytes,
                    code,
                )
                return None

        def unlock() -> None:
            if self.is_initialized:  # else this is a forked child, which must not use CUDA
                with torch.cuda.device(index):
                    torch.cuda.cudart().cudaHostUnregister(address)

        return unlock


_registered: dict[str, Accelerator] = {}


def register(accelerator: Accelerator) -> None:
    """Lets `accelerator` serve all devices of its type, in this process."""
    _registered[accelerator.type] = accelerator


register(Cuda("cuda"))


def of(type: str) -> Accelerator:
    """What serves devices of this type."""
    return _registered.get(type) or Accelerator(type)


def current() -> Accelerator | None:
    """What serves torch's present accelerator, even without a device; `None` if there is none."""
    try:
        device = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6: there is no device
        return None
    return None if device is None else of(device.type)


def available() -> Accelerator | None:
    """The same; `None` if there is no device."""
    return current() if torch.accelerator.is_available() else None


def in_use() -> Accelerator | None:
    """The same; `None` if this process has not used a device."""
    found = current()
    return found if found is not None and found.is_initialized else None


def device_in_use() -> torch.device | None:
    """The current device of this thread; `None` if this process has not used one."""
    found = in_use()
    if found is None:
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())


def on_this_device(work: Callable[P, T]) -> Callable[P, T]:
    """`work`, to be called in another thread, on the current device of this one; or on the first
    with memory of this process, if this thread has none there.

    A new thread has device 0. What torch does there on another device, such as to record an event,
    or to free one, goes back to device 0 afterwards, and opens a context: with CUDA, half a
    gigabyte of the memory of the rank whose device it is.
    """
    accelerator = in_use()
    if accelerator is None:
        return work
    current, held = torch.accelerator.current_device_index(), accelerator.held()
    index = current if current in held else held[0]

    @functools.wraps(work)
    def on_device(*args: P.args, **kwargs: P.kwargs) -> T:
        with contextlib.suppress(RuntimeError):  # of a device that has failed: its use raises it
            torch.accelerator.set_device_index(index)
        return work(*args, **kwargs)

    return on_device


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on the current accelerator: operations on it are only queued."""
    if tensor.device.type in ("cpu", "meta"):
        return False
    found = current()
    return found is not None and found.type == tensor.device.type

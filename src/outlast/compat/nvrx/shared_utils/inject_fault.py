"""Injects a fault into random ranks after a delay. `outlast.chaos` has plans of more kinds."""

from __future__ import annotations

import ctypes
import enum
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outlast import chaos
from outlast.system.parallel import start_thread

# The names of 0.4, then those of 0.2 that differ.
Fault = enum.Enum("Fault", {
    "GPU_ERROR": 1, "GPU_SLEEP": 2, "WORKLOAD_EXC": 3, "ASYNC_EXC": 4, "SIGNAL_EXC": 5,
    "OS_ABORT": 6, "LOCK_GIL": 7, "SEGFAULT": 8, "SIGINT": 9, "SIGKILL": 10, "SIGTERM": 11,
    "SIGSTOP": 12,
    "GPU": 1, "ABORT": 6, "GIL": 7, "INT": 9, "KILL": 10, "TERM": 11, "STOP": 12,
})  # fmt: skip

_asked = threading.Event()


class InjectedException(Exception):
    """What `WORKLOAD_EXC`, `ASYNC_EXC` and `SIGNAL_EXC` raise in the main thread."""


def inject_fault(
    faults: Sequence[Any],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    callback: Callable[[], Any] | None = None,
) -> None:
    """Injects one of `faults` into `num_faults` ranks, but not into the lowest `keep_alive` ones;
    pairs are the least and the largest value. All ranks call it with the same arguments.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    chosen = random.Random(seed)
    seconds = chosen.uniform(*delay) if isinstance(delay, Sequence) else delay
    pair = num_faults if isinstance(num_faults, Sequence) else (num_faults, num_faults)
    count = min(chosen.randint(*pair), size - keep_alive)
    ranks, fault = chosen.sample(range(keep_alive, size), count), chosen.sample(list(faults), 1)[0]
    if rank in ranks:
        dispatch_fault_injection(fault, seconds, callback)


def dispatch_fault_injection(fault: Any, delay: float, callback: Any) -> None:
    """Injects the fault after `delay` seconds and a call of `callback`. Returns at once."""
    if not isinstance(fault, Fault):
        raise RuntimeError(f"unknown fault: {fault!r}")
    if fault is Fault.SIGNAL_EXC:
        signal.signal(signal.SIGUSR1, _raise)
    device = None
    if "GPU" in fault.name:  # that of this thread
        kind = torch.accelerator.current_accelerator()
        if kind is None:
            raise RuntimeError(f"{fault.name}: this process has no accelerator")
        device = torch.device(kind.type, torch.accelerator.current_device_index())
    start_thread("outlast-inject-fault", _inject, fault, delay, callback, device)


def clear_workload_exception() -> None:
    """Forgets a `WORKLOAD_EXC` that was not raised."""
    _asked.clear()


def maybe_raise_workload_exception() -> None:
    """Raises the exception of a `WORKLOAD_EXC`, once, where the program calls this."""
    if _asked.is_set():
        _asked.clear()
        _raise()


def _raise(*_: object) -> None:
    raise InjectedException


def _inject(fault: Any, delay: float, callback: Any, device: torch.device | None) -> None:
    time.sleep(delay)
    if callback is not None:
        callback()
    match fault:
        case Fault.GPU_ERROR:
            one = torch.ones(1, dtype=torch.int64, device=device)
            one[one] = 0  # there is no index 1
        case Fault.GPU_SLEEP:
            torch.accelerator.set_device_index(device)
            torch.get_device_module(device)._sleep(1 << 62)
        case Fault.WORKLOAD_EXC:
            _asked.set()
        case Fault.ASYNC_EXC:
            main = ctypes.c_ulong(threading.main_thread().ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(InjectedException))
        case Fault.OS_ABORT | Fault.LOCK_GIL | Fault.SEGFAULT:
            chaos.fire({6: "abort", 7: "hang_gil", 8: "segfault"}[fault.value])
        case _:
            os.kill(os.getpid(), getattr(signal, fault.name, signal.SIGUSR1))

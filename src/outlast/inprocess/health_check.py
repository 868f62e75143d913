"""Health checks: they raise if a rank must not continue."""

from __future__ import annotations

import abc
import dataclasses
import datetime
from typing import ClassVar

import torch

from outlast.errors import FaultCounterExceeded, HealthCheckError, RankShouldRestart
from outlast.inprocess.finalize import run_within
from outlast.inprocess.state import State
from outlast.system import devices
from outlast.system.arguments import Duration, as_timedelta, check_int
from outlast.system.error_text import first_line

__all__ = [
    "CudaHealthCheck",
    "DeviceHealthCheck",
    "FaultCounter",
    "FaultCounterExceeded",
    "HealthCheck",
]


class HealthCheck(abc.ABC):
    """Runs on every rank before the function in every iteration, and after `finalize`.

    An `Exception` that it raises *before* the function is a fault like one in the function: all
    ranks restart. The check *after* `finalize` then decides whether this rank stays: if it raises,
    the rank leaves with a `HealthCheckError`, and the others continue without it. So a check that
    fails once and then passes costs one restart, not the rank.
    """

    @abc.abstractmethod
    def __call__(
        self, state: State, train_ex: BaseException | None = None
    ) -> tuple[State, BaseException | None]:
        """Raises if the rank must not continue; otherwise returns both arguments.

        Args:
            state: the state of the iteration that begins, or that has ended.
            train_ex: `None` before the function. After `finalize`, the exception that the function
                (or `initialize`, or the check before the function) raised on this rank; `None` if
                the function was interrupted because of another rank.
        """


@dataclasses.dataclass(eq=False)
class DeviceHealthCheck(HealthCheck):
    """Synchronizes with the rank's accelerator in a thread, twice.

    The first synchronization waits for work that the abort has left in the streams, and raises its
    errors; the second checks that the device still responds afterwards.

    The rank's devices are those on which this process has allocated memory, or its current device
    if there are none, or if the type of device has no statistics of memory. If this process has not
    used a device yet, the check does nothing: it allocates no memory there.

    Args:
        timeout: the limit for both together.

    Raises:
        RankTimeout: when called, if a device does not respond; names it. Errors of the device are
            propagated unchanged.
    """

    timeout: Duration = datetime.timedelta(seconds=30)
    _checked: ClassVar[type[devices.Accelerator]] = devices.Accelerator

    def __post_init__(self) -> None:
        self.timeout = as_timedelta("timeout", self.timeout)

    def __call__(
        self, state: State, train_ex: BaseException | None = None
    ) -> tuple[State, BaseException | None]:
        accelerator = devices.in_use()
        if isinstance(accelerator, self._checked):
            held = accelerator.held()
            names = ", ".join(f"{accelerator.type}:{index}" for index in held)
            what = f"rank {state.rank}: {type(self).__name__}: synchronizing with {names}"
            run_within(self.timeout, what, lambda: _synchronize(held * 2))
        return state, train_ex


class CudaHealthCheck(DeviceHealthCheck):
    """`DeviceHealthCheck` for CUDA and ROCm alone: does nothing on another accelerator."""

    _checked = devices.Cuda


@dataclasses.dataclass(eq=False)
class FaultCounter(HealthCheck):
    """Counts the faults of this rank, and makes the rank leave if there are too many.

    A fault is an `Exception`, or a `RankShouldRestart`, that the function itself (or `initialize`,
    or the health check before the function) raised on this rank. Restarts because of other ranks
    are not counted.

    Args:
        max_rank_faults: the allowed number of faults of this rank; `None` for no limit.

    Attributes:
        faults: the number so far.

    Raises:
        FaultCounterExceeded: when called, if the number is exceeded; caused by the last fault.
    """

    max_rank_faults: int | None = None
    faults: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.max_rank_faults is not None:
            check_int("max_rank_faults", self.max_rank_faults, at_least=0)

    def __call__(
        self, state: State, train_ex: BaseException | None = None
    ) -> tuple[State, BaseException | None]:
        if isinstance(train_ex, Exception | RankShouldRestart):
            self.faults += 1
            if self.max_rank_faults is not None and self.faults > self.max_rank_faults:
                raise FaultCounterExceeded(
                    f"rank {state.rank} (initial rank {state.initial_rank}) had {self.faults} "
                    f"faults, more than max_rank_faults={self.max_rank_faults}; the last one: "
                    f"{train_ex!r}"
                ) from train_ex
        return state, train_ex


def check_device_context(rank: int) -> None:
    """Raises a `HealthCheckError` if the context of this process on its devices, such as CUDA's,
    cannot be used any more; it names the rank and the device.

    An error inside a kernel (a device-side assertion, an illegal address) stays: every later CUDA
    call of the process fails with it, in every later iteration too. Only a new process has a new
    context, so this rank must leave. This check runs before every restart, in addition to the
    user's health check. It does not wait for the device: work in progress is no error.
    """
    accelerator = devices.in_use()
    if accelerator is None:
        return
    index = -1
    try:
        for index in accelerator.held():
            accelerator.check(index)
    except RuntimeError as e:
        where = "" if index < 0 else f" on {accelerator.type}:{index}"
        name = accelerator.type.upper()
        raise HealthCheckError(
            f"rank {rank}: the {name} context of this process cannot be used after an error{where},"
            f" and no restart in place can mend it; the process must be replaced: {first_line(e)}"
        ) from e


def _synchronize(indices: list[int]) -> None:
    for index in indices:
        torch.accelerator.synchronize(index)

"""Whether a rank may go on: raises when it must not."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import datetime

import torch

from outlast.errors import FaultCounterExceeded, RankShouldRestart
from outlast.inprocess.finalize import run_within
from outlast.inprocess.state import State
from outlast.system.arguments import check_int
from outlast.system.durations import Duration, as_timedelta

__all__ = ["CudaHealthCheck", "FaultCounter", "FaultCounterExceeded", "HealthCheck"]


class HealthCheck(abc.ABC):
    """Runs on every rank before the function, and after `finalize`.

    Whatever `Exception` it raises says that this rank must not take part any longer: it leaves
    with a `HealthCheckError`, and the others go on without it.
    """

    @abc.abstractmethod
    def __call__(
        self, state: State, train_ex: BaseException | None = None
    ) -> tuple[State, BaseException | None]:
        """Raises if the rank must not go on; returns both arguments otherwise.

        Args:
            state: of the iteration that begins or has ended.
            train_ex: what the function raised on this rank by itself; `None` if it was
                interrupted because of another rank, or has not run yet.
        """


@dataclasses.dataclass(eq=False)
class CudaHealthCheck(HealthCheck):
    """Synchronizes with the rank's GPU in a thread, twice.

    The first time waits for the work that the abort has left in the streams, and brings up its
    errors; the second finds whether the device still answers after that.

    The rank's GPUs are those on which this process holds memory, or its current device if there
    is none. Nothing is done where there is no CUDA, or where this process has not used it yet:
    a check takes no memory on a GPU.

    Args:
        timeout: how long both may take together.

    Raises:
        TimeoutError: when called, if the GPU does not answer; names it. Errors of CUDA go up as
            they are.
    """

    timeout: Duration = datetime.timedelta(seconds=30)

    def __post_init__(self) -> None:
        self.timeout = as_timedelta("timeout", self.timeout)

    def __call__(
        self, state: State, train_ex: BaseException | None = None
    ) -> tuple[State, BaseException | None]:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices = _devices_in_use()
            names = ", ".join(f"cuda:{device}" for device in devices)
            what = f"rank {state.rank}: CudaHealthCheck: synchronizing with {names}"
            run_within(self.timeout, what, lambda: _synchronize(devices * 2))
        return state, train_ex


@dataclasses.dataclass(eq=False)
class FaultCounter(HealthCheck):
    """Counts this rank's own faults, and makes it leave when there are too many.

    A fault is an `Exception`, or a `RankShouldRestart`, that the function raised on this rank by
    itself. Restarts because of other ranks are not counted.

    Args:
        max_rank_faults: how many faults this rank may have; `None` for any number.

    Attributes:
        faults: how many there were.

    Raises:
        FaultCounterExceeded: when called, if there were more; caused by the last fault.
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


def _devices_in_use() -> list[int]:
    held: list[int] = []
    with contextlib.suppress(RuntimeError):  # a pluggable allocator may keep no statistics
        held = [d for d in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(d)]
    return held or [torch.cuda.current_device()]


def _synchronize(devices: list[int]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)

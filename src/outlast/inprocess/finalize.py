"""Finalize policies: they prepare a rank for a restart, after the abort."""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from outlast.errors import RankTimeout
from outlast.inprocess.state import State
from outlast.system.arguments import Duration, as_timedelta, check_callable, seconds
from outlast.system.devices import device_in_use
from outlast.system.parallel import start_thread

__all__ = ["Finalize", "ThreadedFinalize", "run_within"]


class Finalize(abc.ABC):
    """Runs on every rank after the abort of an iteration, before its health check.

    If it raises, the exception is propagated unchanged: this rank leaves, and the others continue.
    """

    @abc.abstractmethod
    def __call__(
        self, state: State, train_ex: BaseException | None = None
    ) -> tuple[State, BaseException | None]:
        """Runs; returns both arguments, changed or not.

        Args:
            state: the state of the iteration that has ended.
            train_ex: the exception that the function itself raised on this rank; `None` if it was
                interrupted because of another rank.
        """


@dataclasses.dataclass(eq=False)
class ThreadedFinalize(Finalize):
    """Runs `fn(*args, **kwargs)` in a thread, for at most `timeout`.

    The thread has the caller's current device. After the timeout the thread is abandoned,
    because Python cannot end it: as a daemon, it does not delay the exit of the process.

    Args:
        timeout: how long `fn` may take.
        fn: the function to run.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        RankTimeout: when called, if `fn` has not returned within `timeout`; names both.
            Exceptions that `fn` raises are propagated unchanged.
    """

    timeout: Duration
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.timeout = as_timedelta("timeout", self.timeout)
        check_callable("fn", self.fn)
        if not isinstance(self.args, tuple | list):
            raise TypeError(f"args must be a tuple, not {self.args!r}")
        if self.kwargs is not None and not isinstance(self.kwargs, Mapping):
            raise TypeError(f"kwargs must be a mapping, not {self.kwargs!r}")

    def __call__(
        self, state: State, train_ex: BaseException | None = None
    ) -> tuple[State, BaseException | None]:
        name = getattr(self.fn, "__qualname__", None) or repr(self.fn)
        run_within(
            self.timeout,
            f"rank {state.rank}: ThreadedFinalize: {name}",
            lambda: self.fn(*self.args, **(self.kwargs or {})),
        )
        return state, train_ex


def run_within(timeout: Duration, what: str, call: Callable[[], Any]) -> None:
    """Runs `call` in a daemon thread. Raises its error, or a `RankTimeout` about `what`."""
    raised: list[BaseException] = []
    # A new thread starts on device 0, not on the device of this one.
    device = device_in_use()

    def run() -> None:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device.index)
            call()
        except BaseException as e:  # noqa: BLE001 - raised again in the calling thread
            raised.append(e)

    thread = start_thread("outlast-run-within", run)
    thread.join(min(seconds(timeout), threading.TIMEOUT_MAX))
    if thread.is_alive():
        raise RankTimeout(f"{what} was not done within timeout={seconds(timeout)} s")
    if raised:
        try:
            raise raised[0]
        finally:
            raised.clear()  # otherwise the exception and this frame form a reference cycle

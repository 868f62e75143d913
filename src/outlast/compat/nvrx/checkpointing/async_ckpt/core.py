"""`AsyncCallsQueue` and `AsyncRequest` with the signatures of 0.4, on `outlast.async_checkpoint`.

A background process that fails or dies fails its call on all ranks, and is not finalized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from outlast import async_checkpoint

__all__ = ["AsyncCallsQueue", "AsyncRequest"]


class AsyncRequest(NamedTuple):
    """A background function, and functions to run when all ranks have finished it.

    Attributes:
        async_fn: runs in another process; `None` where this rank has nothing to do.
        async_fn_args, async_fn_kwargs: its arguments.
        finalize_fns: run in this process, in order, after `async_fn` has finished on all ranks.
        preload_fn: runs in this process when the request is scheduled; its result replaces
            `async_fn_args[1]`.
        is_frozen: whether no more finalize functions can be added.
        call_idx: accepted; the queue numbers its calls itself.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - read, and never written
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Appends a finalize function; a `RuntimeError` if the request is frozen."""
        if self.is_frozen:
            raise RuntimeError("the request is frozen: no finalize function can be added")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """The same request, frozen."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Does the same work synchronously, on all ranks."""
        preloaded(self).execute_sync()

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Runs the finalize functions; returns the index of the call."""
        for fn in self.finalize_fns:
            fn()
        return self.call_idx


class AsyncCallsQueue(async_checkpoint.AsyncCallsQueue):
    """`outlast.async_checkpoint.AsyncCallsQueue`, persistent by default as in 0.4.

    Args:
        persistent: run all calls in one process; functions and arguments are pickled.
    """

    def __init__(self, persistent: bool = True) -> None:
        super().__init__(persistent)

    def schedule_async_request(self, async_request: Any) -> int:
        return super().schedule_async_request(preloaded(async_request))

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        return super().maybe_finalize_async_calls(blocking, no_dist)


def preloaded(request: Any) -> async_checkpoint.AsyncRequest:
    """The request of `outlast.async_checkpoint`, after `preload_fn` has run."""
    arguments = list(request.async_fn_args)
    preload = getattr(request, "preload_fn", None)
    if preload is not None:
        arguments[1] = preload()
    return async_checkpoint.AsyncRequest(
        request.async_fn,
        tuple(arguments),
        list(request.finalize_fns),
        dict(request.async_fn_kwargs or {}),
    )

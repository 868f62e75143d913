"""A request: the background function, and the functions that finalize it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["AsyncRequest", "name_of"]


class AsyncRequest(NamedTuple):
    """A background function, and functions to run when all ranks have finished it.

    Attributes:
        async_fn: runs in another process; `None` where this rank has nothing to do.
        async_fn_args: its arguments.
        finalize_fns: run in this process, in order, after `async_fn` has finished on all ranks.
        async_fn_kwargs: its keyword arguments.
        is_frozen: whether no more finalize functions can be added.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - read, and never written
    is_frozen: bool = False

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Appends a finalize function.

        Raises:
            RuntimeError: if the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("the request is frozen: no finalize function can be added")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """The same request, frozen."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Does the same work synchronously. Call it on all ranks of the default process group, if
        there is one: they wait for each other before the finalize functions.

        Raises:
            Exception: the error of `async_fn`, on the rank where it failed.
            AsyncCallError: on the other ranks. Nothing is finalized on any rank.
        """
        from outlast.coordination.collectives import raise_together, rank_of

        error: Exception | None = None
        try:
            if self.async_fn is not None:
                self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)
        except Exception as e:  # noqa: BLE001 - the other ranks must learn of it first
            error = e
        raise_together(error, f"{name_of(self.async_fn)} failed", rank_of(None))
        for fn in self.finalize_fns:
            fn()


def name_of(fn: Callable[..., Any] | None) -> str:
    """The name of a function in messages; the same on all ranks."""
    if fn is None:
        return "nothing"
    inner = getattr(fn, "func", fn)  # of a `functools.partial`
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    module = getattr(inner, "__module__", None)
    return f"{module}.{name}" if module and module != "__main__" else str(name)

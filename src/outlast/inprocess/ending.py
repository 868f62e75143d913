"""Hooks at the end of a wrapped call: `Completion` after success, `Terminate` after a failure."""

from __future__ import annotations

import abc

from outlast.inprocess.state import State

__all__ = ["Completion", "Terminate"]


class Completion(abc.ABC):
    """Runs on every rank, reserve ranks included, once the function has returned on all of them.

    An `Exception` that it raises is logged: the job has completed, and the function's value is
    returned.
    """

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Runs; returns the state. The return value is not used."""


class Terminate(abc.ABC):
    """Runs on a rank that leaves the job with an exception, before it is raised.

    An `Exception` that it raises is logged: the exception that ends this rank is raised.
    """

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Runs; returns the state. The return value is not used."""

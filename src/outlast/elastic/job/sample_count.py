"""Counts the samples that a job has trained on, over all ranks."""

from __future__ import annotations

from typing import Any

from outlast.system.arguments import as_int

_UNKNOWN = -1  # as saved in a checkpoint


class SampleCount:
    """The count, from what the caller of each step says or what the loader has counted.

    A loader counts in `trained`, which only grows (`ElasticLoader`, `ShardedStream`), or returns
    the samples of the last batch from `done()`. The difference of `trained` between two steps is
    right however many batches there were in between. Without either, the count is unknown: a
    number that lacks some steps would be wrong.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._total = 0
        self._before = getattr(loader, "trained", 0)

    @property
    def total(self) -> int:
        """The number of samples.

        Raises:
            ValueError: if it is unknown.
        """
        if self._total == _UNKNOWN:
            loader = "no loader" if self._loader is None else f"a {type(self._loader).__name__}"
            raise ValueError(
                f"job.samples is unknown: a step was made with {loader}, which does not count "
                "samples, and without job.step(samples=...), the samples of the step on all ranks"
            )
        return self._total

    def add_step(self, samples: int | None) -> None:
        """Adds the samples of one step; `None` if the caller did not say how many."""
        counted = self._counted()
        if samples is not None:
            counted = as_int("samples", samples, at_least=0)
        if counted is None or self._total == _UNKNOWN:
            self._total = _UNKNOWN
        else:
            self._total += counted

    def saved(self) -> int:
        """The value for a checkpoint."""
        return self._total

    def load(self, saved: int) -> None:
        """Continues from a saved value."""
        self._total = max(int(saved), _UNKNOWN)
        self._before = getattr(self._loader, "trained", 0)

    def _counted(self) -> int | None:
        """The samples of the batches since the last step, as counted by the loader."""
        last: int | None = self._loader.done() if hasattr(self._loader, "done") else None
        if not hasattr(self._loader, "trained"):
            return last
        before, self._before = self._before, int(self._loader.trained)
        return self._before - before

"""Stands in for nvidia-resiliency-ext 0.4: names and signatures of its restart in place.

    import outlast.compat.nvrx.inprocess as inprocess   # was: nvidia_resiliency_ext.inprocess

`docs/migration.md` lists what is the same, what is better and what is missing. A program whose
imports cannot be changed calls `install()` before them.

What policies of a user's own may notice:

* In a job, `FillGaps` gives no rank outside the new size when a rank at or above it is lost too.
* `state.active_rank` equals `state.rank` on active ranks, which are the lowest.
* `Tree` fills the places of several lost ranks in the order of the active rank, raises
  `RestartAbort` if no active rank is left, and has no attributes such as `init_rank_map`.
* Without `ActivateAllRanks` all ranks are active; 0.4 raises an `InternalError`. Filters that leave
  no rank active raise `RestartAbort`.
* A terminated rank that is part of the world size after the assignment is a `RestartError`; 0.4
  leaves its place empty.
* `Interruption` has no `MONITOR_PROCESS_EXCEPTION`.
* A subclass of `StoreMixin` has `endpoint` and `serve` in place of barriers and counters.

To the names of `outlast.inprocess`:

| 0.4 | `outlast.inprocess` |
|---|---|
| `Compose(ActivateAllRanks(), ShiftRanks())` | `ShiftRanks()`: all ranks are active |
| `rank_assignment.MaxActiveWorldSize(n)` | `rank_filter.MaxActiveWorldSize(n)` |
| `rank_assignment.ActiveWorldSizeDivisibleBy(n)` | `rank_filter.WorldSizeDivisibleBy(n)` |
| `FilterCountGroupedByKey(key_or_fn, ...)` | `FilterGroupedByKey`, with `fn(rank, world_size)` |
| `monitor_thread.RankShouldRestart` | `RankShouldRestart` |
| `rank_assignment.Tree`, `Layer`, `LayerFlag` | those of `outlast.compat.nvrx.tree` |
| `completion.Completion`, `terminate.Terminate` | `ending.Completion`, `ending.Terminate` |
| a rank assignment: `ctx -> ctx` | `(state, ranks) -> (state, ranks)`, `ranks` a `set` |
| `Finalize`, `HealthCheck`: `state -> state` | `(state, train_ex) -> (state, train_ex)` |
| `FrozenState`, `state.mode`, `Mode` | `State`, `state.status`, `Status` |
| `state.active_rank`, `state.fn_exception` | `state.rank`, `train_ex` |
| `heartbeat_interval=` | `monitor_process_interval=` |
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

__all__ = ["install"]

__version__ = "0.4.1"
"""Of the package whose names these are."""

_REPLACED = "nvidia_resiliency_ext"
# Megatron-core 0.18 and later use the asynchronous saves of 0.6 where all of four modules are
# found, and end with an assertion where these are older. Without this one, they use their own.
_PROBED = f"{_REPLACED}.checkpointing.async_ckpt.cached_metadata_filesystem_reader"


def install() -> None:
    """Makes `import nvidia_resiliency_ext...` find the modules of this package, in this process.

    Raises:
        RuntimeError: if the real package was imported before.
    """
    this = sys.modules[__name__]
    if sys.modules.setdefault(_REPLACED, this) is not this:
        raise RuntimeError(f"{_REPLACED} is imported already: call install() before")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds each module of the replaced package in this one, when it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_REPLACED}."):
            return None
        if fullname == _PROBED or _standing_in(fullname) is None:
            raise ModuleNotFoundError(
                f"{fullname} has no counterpart among the modules that outlast.compat.nvrx."
                "install() puts in its place; docs/migration.md says what to write instead",
                name=fullname,
            )
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: types.ModuleType) -> None:
        # The import continues with what is here afterwards: one module under two names.
        sys.modules[module.__name__] = importlib.import_module(_name(module.__name__))


def _name(replaced: str) -> str:
    return replaced.replace(_REPLACED, __name__, 1)


def _standing_in(replaced: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(_name(replaced))
    except ModuleNotFoundError:
        return None

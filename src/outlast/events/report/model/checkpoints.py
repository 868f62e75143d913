"""The checkpoints of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save.

    Attributes:
        at: when `save` was called.
        seconds: until the commit, or until the save failed.
        cause: why it was not committed; empty if it was.
    """

    step: int
    host: str
    at: float
    blocked_seconds: float
    seconds: float
    size_bytes: int
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Restore:
    """One restore; `source` as in `Saves.restored`, `at` when it had ended."""

    step: int
    host: str
    at: float
    source: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Saves:
    """The checkpoints of a run, as rank 0 saw them; a save ends the same way on all ranks.

    Attributes:
        committed: number of committed saves.
        size_bytes, newest: the size and the step of the last one.
        blocked_median, blocked_worst: seconds for which `save` blocked training.
        durable_median: seconds until the commit.
        failed: step and cause of each that was not committed.
        restored: step and source of each restore: storage, memory, or memory and the copies of
            named ranks.
        passed_over: step and cause of each that a restore found damaged and skipped.
        copied: number of saves that were copied to other hosts' memory.
        copied_bytes, copied_median: what rank 0 sent for the last one; seconds until it was there.
        removed: number of checkpoints that the retention policy removed.
        each: the saves, in their order.
        restores: the restores, in their order.
        not_copied: step and cause of each that was not; step -1 if none could be.
    """

    committed: int
    size_bytes: int
    newest: int
    blocked_median: float
    blocked_worst: float
    durable_median: float
    failed: tuple[tuple[int, str], ...]
    restored: tuple[tuple[int, str], ...]
    passed_over: tuple[tuple[int, str], ...]
    copied: int = 0
    copied_bytes: int = 0
    copied_median: float = 0.0
    not_copied: tuple[tuple[int, str], ...] = ()
    removed: int = 0
    each: tuple[Save, ...] = ()
    restores: tuple[Restore, ...] = ()

"""The events of checkpoints: saved, restored, removed, copied to other hosts."""

from __future__ import annotations

import dataclasses

from outlast.events.types.base import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointCommitted(Event, kind="checkpoint_committed"):
    """A checkpoint is durable and visible, on all ranks.

    `size_bytes` is the total, `own_bytes` this rank's part. `blocked_seconds` is how long `save`
    blocked training, `seconds` how long the commit took, `queued` the number of saves behind it.
    """

    step: int = -1
    size_bytes: int = 0
    own_bytes: int = 0
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    queued: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event, kind="checkpoint_failed"):
    """A save failed on all ranks. Nothing of it is visible."""

    step: int = -1
    cause: str = ""
    blocked_seconds: float = 0.0
    seconds: float = 0.0
    queued: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRestored(Event, kind="checkpoint_restored"):
    """All ranks loaded a checkpoint. `source`: memory, copies, storage.

    With copies, some ranks' snapshots were fetched from the memory of another host: `fetched_bytes`
    by this rank, from host `held_by`. `not_live`: after a fault, why no rank's state was used.
    """

    step: int = -1
    source: str = ""
    seconds: float = 0.0
    fetched_bytes: int = 0
    held_by: str = ""
    not_live: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NothingToRestore(Event, kind="nothing_to_restore"):
    """A restore found no checkpoint: training begins with the initial state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointPassedOver(Event, kind="checkpoint_passed_over"):
    """A checkpoint was skipped by a load because it is incomplete or damaged."""

    step: int = -1
    source: str = ""
    cause: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRemoved(Event, kind="checkpoint_removed"):
    """The retention policy removed a checkpoint."""

    step: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyCompleted(Event, kind="copy_completed"):
    """All ranks' snapshots of a step are in the memory of other hosts too; this rank's on host
    `held_by`. `seconds` is the time from the save.
    """

    step: int = -1
    own_bytes: int = 0
    seconds: float = 0.0
    held_by: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopySkipped(Event, kind="copy_skipped"):
    """A snapshot was not copied to the memory of other hosts, on no rank."""

    step: int = -1
    cause: str = ""

"""The events of the training itself: its steps, and requests to stop it."""

from __future__ import annotations

import dataclasses

from outlast.events.types.base import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRequested(Event, kind="stop_requested"):
    """The whole job was told to stop; the launcher or each rank of a `Job` writes it."""

    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsDone(Event, kind="steps_done"):
    """This rank has completed the steps after `first` up to and including `last`; `Job` writes it
    every few seconds and when it ends, with the same `first`.
    """

    first: int = 0
    last: int = 0

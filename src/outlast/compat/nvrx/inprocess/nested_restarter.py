"""Callbacks that tell an outer restarter, by log lines, what the restart in place does."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from outlast.inprocess.abort import Abort
from outlast.inprocess.ending import Completion, Terminate
from outlast.inprocess.initialize import Initialize

__all__ = [
    "NestedRestarterAborted",
    "NestedRestarterCallback",
    "NestedRestarterFinalized",
    "NestedRestarterHandlingCompleted",
    "NestedRestarterHandlingStarting",
    "NestedRestarterLogger",
]


class NestedRestarterLogger:
    """Writes the lines at level INFO. It adds no handler: configure the logger `name`."""

    def __init__(self, name: str = "outlast.compat.nvrx.nested_restarter") -> None:
        self.restarter_logger = logging.getLogger(name)

    def set_connected_rank(self, rank: int | None) -> None:
        """Sets the rank that the lines are about."""
        self.rank = rank

    def log_for_restarter(self, message: str) -> None:
        """Writes one line."""
        self.restarter_logger.info(message)


_LOGGER = NestedRestarterLogger()


@dataclasses.dataclass
class NestedRestarterCallback:
    """Writes a line on one rank.

    Args:
        restarter_state, restarter_stage: what the line says.
        logger: writes the line.
        special_rank: the initial rank that writes it.
    """

    restarter_state: str
    restarter_stage: str | None = None
    logger: NestedRestarterLogger = dataclasses.field(default=_LOGGER)
    special_rank: int = 0

    def __call__(self, state: Any) -> Any:
        if state.initial_rank == self.special_rank:
            stage = f" stage={self.restarter_stage}" if self.restarter_stage is not None else ""
            self.logger.set_connected_rank(state.initial_rank)
            self.logger.log_for_restarter(
                f"[NestedRestarter] name=[InProcess] state={self.restarter_state}{stage}"
            )
        return state


@dataclasses.dataclass(init=False)
class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """For `initialize`: `initialize` at first, then `handling`, `completed`."""

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__("initialize", special_rank=special_rank)

    def __call__(self, state: Any) -> Any:
        state = super().__call__(state)
        self.restarter_state, self.restarter_stage = "handling", "completed"
        return state


@dataclasses.dataclass
class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """For `abort`: the handling of a fault starts."""

    restarter_state: str = "handling"
    restarter_stage: str | None = "starting"


@dataclasses.dataclass
class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """For `completion`: the job has completed."""

    restarter_state: str = "finalized"


@dataclasses.dataclass
class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """For `terminate`: the rank leaves."""

    restarter_state: str = "aborted"

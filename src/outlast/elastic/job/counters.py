"""The counters of a job: steps, samples and time, which are part of its checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from outlast.elastic.job.sample_count import SampleCount
from outlast.errors import CheckpointMismatch


class Counters:
    """The counters.

    Attributes:
        steps: the number of steps since the first run.
        seconds: the time until the state that was restored.
        samples: counts the samples, with the help of the loader.
        clean_step: the last step after which the replicas are known to have been equal. A
            checkpoint contains one copy of them: where it was loaded, they are equal.
    """

    def __init__(self, loader: Any) -> None:
        self.steps = self.clean_step = 0
        self.seconds = 0.0
        self.samples = SampleCount(loader)
        self._since = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """The present values."""
        return {
            "steps": self.steps,
            "samples": self.samples.saved(),
            "seconds": self.seconds + time.monotonic() - self._since,
        }

    def live_state_dict(self) -> dict[str, Any]:
        """The values with which the surviving ranks continue: each from its own replica."""
        return {**self.state_dict(), "clean_step": self.clean_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from saved values.

        Raises:
            CheckpointMismatch: as `check_counters`; nothing has changed then.
        """
        check_counters(state)
        self.steps = int(state["steps"])
        self.clean_step = int(state.get("clean_step", self.steps))
        self.samples.load(state["samples"])
        self.seconds = float(state["seconds"])
        self._since = time.monotonic()


def check_counters(state: Mapping[str, Any]) -> None:
    """Checks saved values, which other programs may have written.

    Raises:
        CheckpointMismatch: naming the first one that is missing or no number.
    """
    for name in ("steps", "samples", "seconds"):
        value = state.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointMismatch(
                f"'counters.{name}' of the state is {value!r}, and not a number: it was not saved "
                "by a Job, or was changed since"
            )

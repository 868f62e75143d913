"""The counters of a job: steps, samples and time, which are part of its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from outlast.elastic.job.sample_count import SampleCount


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
        """Continues from saved values."""
        self.steps = int(state["steps"])
        self.clean_step = int(state.get("clean_step", self.steps))
        self.samples.load(state["samples"])
        self.seconds = float(state["seconds"])
        self._since = time.monotonic()

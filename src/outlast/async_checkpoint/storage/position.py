"""The position of a process in its job, by which a later process of the job takes its place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in a job on many hosts.

    Attributes:
        run: identifies the job.
        order: attempt, call and iteration; later ones compare greater.
        lease: the path of the host's lease page.
    """

    run: str
    order: tuple[int, ...]
    lease: str = ""

    def precedes(self, run: str, order: Iterable[int]) -> bool:
        """Whether this later position is one of the same job."""
        return run == self.run and tuple(order) > self.order

    def replaces(self, holder: str) -> bool:
        """Whether the process that wrote this `signature` into a lock is an earlier one of the job.

        All processes that take part in the job now have opened the storage together, and the one
        that held the lock before has released it: so this one takes part no longer.
        """
        try:
            said = json.loads(holder)
            return bool(said["run"] == self.run and tuple(said["order"]) < self.order)
        except (ValueError, KeyError, TypeError):
            return False

    @property
    def signature(self) -> str:
        """For a lock."""
        return json.dumps({"run": self.run, "order": self.order})

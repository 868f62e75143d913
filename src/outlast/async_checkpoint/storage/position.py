"""The position of a process in its job, by which a later process of the job takes its place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in a job on many hosts.

    Attributes:
        run: identifies the job. What is before a `-` is the same in two groups of hosts that run
            one job at the same time because they could not find each other.
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
        run, order = _said(holder)
        return bool(order) and run == self.run and order < self.order

    def in_another_group(self, holder: str) -> bool:
        """Whether another group of hosts with the same run id wrote this `signature`. One of the
        two ends when they meet.
        """
        job, separator, group = _said(holder)[0].partition("-")
        own, _, mine = self.run.partition("-")
        return bool(separator) and job == own and group != mine

    @property
    def signature(self) -> str:
        """For a lock."""
        return json.dumps({"run": self.run, "order": self.order})


def _said(holder: str) -> tuple[str, tuple[int, ...]]:
    """The run and the order in a signature; empty if it is none."""
    try:
        said = json.loads(holder)
        return str(said["run"]), tuple(int(number) for number in said["order"])
    except (ValueError, KeyError, TypeError):
        return "", ()

"""What the decisions for a job on many hosts depend on, and what a job waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from outlast.coordination.records import SizeRecord
from outlast.launch.agent.decisions import JobRecord

SMALLER_S, NEEDED_S = 1.0, 600.0
"""How long the ranks of a lost host wait for another host: if the job may continue without it, and
if it may not. A job that has continued grows again when a host comes, which costs one restart; so
the first wait is only for hosts that are about to join. (Spares take the place at once.)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What the agents have reported, and the state of the wrapped function."""

    job: JobRecord = dataclasses.field(default_factory=JobRecord)
    # hosts on which no process of the attempt is left, after a restart was decided
    cleared: frozenset[str] = frozenset()
    done: frozenset[str] = frozenset()  # hosts whose workers have all ended, and are not replaced
    # replacements of single workers in this attempt: what counts beside `JobPlan.used`
    used: int = 0
    # the key of the last suspicion that a link is broken; empty if there was none
    suspicion: str = ""
    # of the probe that runs, which hosts each host could not reach
    links: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    # of the check of neighbors that runs, with which each host has failed, and why
    checks: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    ready: Collection[str] = frozenset()  # hosts that can be checked
    # what the members need that hold a restart; `None` if they have not said so
    size: SizeRecord | None = None
    leader: str = ""  # ID of the host that leads
    least: int = -1  # the ranks that the function needs; -1 if not known. Read if a host leaves
    # hosts whose ranks are to move to a host that is lost, and were not asked to leave yet
    unasked: Collection[str] = frozenset()
    # hosts that wait to leave, of which ranks are in the job: others still import
    there: Collection[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Wait:
    """What the job waits for: `what` in words, and until when, by this agent's clock; `None` if
    that depends on the hosts alone. `then` is what happens at that time. `at_once` is whether to
    tell it from the first moment on.
    """

    what: str
    until: float | None = None
    then: str = ""
    at_once: bool = False

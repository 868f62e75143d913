"""The report as plain dataclasses: the restarts, the phases of each, and the totals.

Every time `at` is in seconds from the first event of the host on which it happened, since the
monotonic clocks of two hosts have nothing in common. An unknown duration is `None`.
"""

from outlast.events.report.model.checkpoints import Restore, Save, Saves
from outlast.events.report.model.restarts import (
    PHASE_FIELDS,
    Cause,
    HostLoss,
    Party,
    Phases,
    Recovery,
    Restart,
)
from outlast.events.report.model.run import (
    CauseCount,
    Distribution,
    HostCount,
    InjectedFault,
    Report,
    Stop,
)
from outlast.events.report.model.silent_faults import Mismatch, Straggler
from outlast.events.report.model.timeline import HostTimeline, Lane, Mark, Span
from outlast.events.report.model.times import HostTime, LostTime, RestartParts

__all__ = [
    "PHASE_FIELDS",
    "Cause",
    "CauseCount",
    "Distribution",
    "HostCount",
    "HostLoss",
    "HostTime",
    "HostTimeline",
    "InjectedFault",
    "Lane",
    "LostTime",
    "Mark",
    "Mismatch",
    "Party",
    "Phases",
    "Recovery",
    "Report",
    "Restart",
    "RestartParts",
    "Restore",
    "Save",
    "Saves",
    "Span",
    "Stop",
    "Straggler",
]

"""Which fault of an iteration caused the others: the ranks decide by it, and the report names it
where the ranks have left no decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.events.hung_ranks import T, hung_ranks
from outlast.events.restart_causes import HUNG, Interruption

# A process that ended is the cause of the faults of its peers, whichever was reported first.
_SEVERITY: dict[str, int] = {
    Interruption.TERMINATED: 0,
    Interruption.HARD_TIMEOUT: 0,
    Interruption.UNRESPONSIVE: 1,
}
_NOT_SEVERE = 2


def first_cause(faults: Sequence[T]) -> T | None:
    """The fault that caused the others.

    A fault of a rank itself comes before all others. Then, of the hung ranks (`SOFT_TIMEOUT`), the
    one that the others waited for stands for all (`hung_ranks`). An exception that an interrupt has
    overtaken, which the program may have handled, comes before the echoes of another fault; in a
    hang after them, since the interrupt came because of the hang. Of several of a kind it is the
    most severe, and of these the one that was reported first, in the order of the store.
    """
    hung = hung_ranks(faults)[:1]
    others = [fault for fault in faults if fault.interruption != HUNG]
    own = [fault for fault in others if not (fault.consequence or fault.overtaken)]
    overtaken = [fault for fault in others if fault.overtaken and not fault.consequence]
    echoes = [fault for fault in others if fault.consequence]
    for kind in (own, hung, echoes, overtaken) if hung else (own, overtaken, echoes):
        if kind:
            return min(kind, key=lambda fault: _SEVERITY.get(fault.interruption, _NOT_SEVERE))
    return None

"""How processes agree: the store, the ledger of lost members, barriers, views.

Modules are imported on first use: the background processes of `outlast` import some of this
package, and do not need torch, whose import takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.system.lazy_exports import exports

if TYPE_CHECKING:
    from outlast.coordination.decision import Joiner, ViewRecord, decide
    from outlast.coordination.membership import COMPLETED, RESTART, MembershipProtocol
    from outlast.coordination.ops import Link, Op, drive, perform_on
    from outlast.coordination.records import FaultRecord, LostRecord, first_cause
    from outlast.coordination.stores.store import KeyTimeout, MemoryStore, Store
    from outlast.coordination.stores.torch_store import TorchStore

__all__ = [
    "COMPLETED",
    "RESTART",
    "FaultRecord",
    "Joiner",
    "KeyTimeout",
    "Link",
    "LostRecord",
    "MembershipProtocol",
    "MemoryStore",
    "Op",
    "Store",
    "TorchStore",
    "ViewRecord",
    "decide",
    "drive",
    "first_cause",
    "perform_on",
]

_NAMES = {
    "membership": ("COMPLETED", "RESTART", "MembershipProtocol"),
    "ops": ("Link", "Op", "drive", "perform_on"),
    "records": ("FaultRecord", "LostRecord", "first_cause"),
    "stores.store": ("KeyTimeout", "MemoryStore", "Store"),
    "stores.torch_store": ("TorchStore",),
    "decision": ("Joiner", "ViewRecord", "decide"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__getattr__, __dir__ = exports(__name__, _MODULES)

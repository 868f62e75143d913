"""How processes agree: the store, the ledger of the lost, barriers, views."""

from outlast.coordination.memory import MemoryStore
from outlast.coordination.ops import Link, Op, drive, perform_on
from outlast.coordination.protocol import COMPLETED, RESTART, Job
from outlast.coordination.records import FaultRecord, LostRecord, first_cause
from outlast.coordination.store import KeyTimeout, Store
from outlast.coordination.torch_store import TorchStore
from outlast.coordination.view import Joiner, ViewRecord, decide

__all__ = [
    "COMPLETED",
    "RESTART",
    "FaultRecord",
    "Job",
    "Joiner",
    "KeyTimeout",
    "Link",
    "LostRecord",
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

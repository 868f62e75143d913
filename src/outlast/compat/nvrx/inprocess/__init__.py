"""Restart in place with the names and signatures of nvidia_resiliency_ext.inprocess 0.4."""

import sys
from types import ModuleType

from outlast.compat.nvrx import shared_utils as tools
from outlast.compat.nvrx import state
from outlast.compat.nvrx.inprocess import policies, rank_assignment
from outlast.compat.nvrx.inprocess.wrap import CallWrapper, Wrapper
from outlast.compat.nvrx.shared_utils import inject_fault
from outlast.compat.nvrx.state import FrozenState, Mode, State
from outlast.inprocess import abort, attribution, compose, ending, initialize, store
from outlast.inprocess.compose import Compose

completion = terminate = ending
exception = finalize = health_check = monitor_thread = nested_restarter = rank_filter = policies

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Mode",
    "State",
    "Wrapper",
    "abort",
    "attribution",
    "completion",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_thread",
    "nested_restarter",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
    "terminate",
    "tools",
]

# Modules with other names, which `import outlast.compat.nvrx.inprocess.abort` finds as well.
_SAME = {name: globals()[name] for name in __all__}
_SAME |= {"compose": compose, "tools.inject_fault": inject_fault}
sys.modules.update(
    {f"{__name__}.{name}": each for name, each in _SAME.items() if isinstance(each, ModuleType)}
)

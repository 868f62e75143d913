"""Restart in place with the names and signatures of nvidia_resiliency_ext.inprocess 0.4."""

import sys

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

# Modules with other names, which `import outlast.compat.nvrx.inprocess.abort` finds as well.
_SAME = {
    "abort": abort,
    "attribution": attribution,
    "completion": completion,
    "compose": compose,
    "exception": exception,
    "finalize": finalize,
    "health_check": health_check,
    "initialize": initialize,
    "monitor_thread": monitor_thread,
    "nested_restarter": nested_restarter,
    "rank_filter": rank_filter,
    "state": state,
    "store": store,
    "terminate": terminate,
    "tools": tools,
    "tools.inject_fault": inject_fault,
}
sys.modules.update({f"{__name__}.{name}": module for name, module in _SAME.items()})

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

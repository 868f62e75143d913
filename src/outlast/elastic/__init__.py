"""State that comes back whole, at any size: saved once by a job, loaded by a job of another size.

Nothing happens on import, and nothing is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.lazy import exports

if TYPE_CHECKING:
    from outlast.elastic.consistent import ConsistentDDP
    from outlast.elastic.environment import (
        checkpoint_path,
        from_ray,
        num_replicas,
        num_restarts,
        replica_rank,
    )
    from outlast.elastic.job import Job
    from outlast.elastic.loader import ElasticLoader
    from outlast.elastic.pending import PendingSave
    from outlast.elastic.random_state import RandomState
    from outlast.elastic.restoring import load_all_states, load_state
    from outlast.elastic.sampler import ElasticSampler
    from outlast.elastic.saving import save_all_states, save_state
    from outlast.elastic.sharded_state import ShardedState
    from outlast.elastic.state import State
    from outlast.elastic.states import (
        CounterState,
        EMAState,
        ModuleState,
        OptimizerState,
        ScalerState,
        SchedulerState,
        StateDictState,
    )
    from outlast.elastic.stream import ShardedStream

__all__ = [
    "ConsistentDDP",
    "CounterState",
    "EMAState",
    "ElasticLoader",
    "ElasticSampler",
    "Job",
    "ModuleState",
    "OptimizerState",
    "PendingSave",
    "RandomState",
    "ScalerState",
    "SchedulerState",
    "ShardedState",
    "ShardedStream",
    "State",
    "StateDictState",
    "checkpoint_path",
    "from_ray",
    "load_all_states",
    "load_state",
    "num_replicas",
    "num_restarts",
    "replica_rank",
    "save_all_states",
    "save_state",
]

_NAMES = {
    "consistent": ("ConsistentDDP",),
    "environment": (
        "checkpoint_path",
        "from_ray",
        "num_replicas",
        "num_restarts",
        "replica_rank",
    ),
    "job": ("Job",),
    "loader": ("ElasticLoader",),
    "pending": ("PendingSave",),
    "random_state": ("RandomState",),
    "restoring": ("load_all_states", "load_state"),
    "sampler": ("ElasticSampler",),
    "saving": ("save_all_states", "save_state"),
    "sharded_state": ("ShardedState",),
    "state": ("State",),
    "states": (
        "CounterState",
        "EMAState",
        "ModuleState",
        "OptimizerState",
        "ScalerState",
        "SchedulerState",
        "StateDictState",
    ),
    "stream": ("ShardedStream",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__getattr__, __dir__ = exports(__name__, _MODULES)

"""Elastic state: saved by a job of one size, loaded by a job of any other size.

An import has no side effects, and each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.system.lazy_exports import exports

if TYPE_CHECKING:
    from outlast.elastic.data.loader import ElasticLoader
    from outlast.elastic.data.sampler import ElasticSampler
    from outlast.elastic.data.stream import ShardedStream
    from outlast.elastic.environment import (
        checkpoint_path,
        from_ray,
        num_replicas,
        num_restarts,
        replica_rank,
    )
    from outlast.elastic.job.job import Job
    from outlast.elastic.numerics.consistent_ddp import ConsistentDDP
    from outlast.elastic.states.load import load_all_states, load_state
    from outlast.elastic.states.pending_save import PendingSave
    from outlast.elastic.states.random_state import RandomState
    from outlast.elastic.states.ready_made import (
        CounterState,
        EMAState,
        ModuleState,
        OptimizerState,
        ScalerState,
        SchedulerState,
        StateDictState,
    )
    from outlast.elastic.states.save import save_all_states, save_state
    from outlast.elastic.states.sharded_state import ShardedState
    from outlast.elastic.states.state import State

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
    "numerics.consistent_ddp": ("ConsistentDDP",),
    "environment": (
        "checkpoint_path",
        "from_ray",
        "num_replicas",
        "num_restarts",
        "replica_rank",
    ),
    "job.job": ("Job",),
    "data.loader": ("ElasticLoader",),
    "states.pending_save": ("PendingSave",),
    "states.random_state": ("RandomState",),
    "states.load": ("load_all_states", "load_state"),
    "data.sampler": ("ElasticSampler",),
    "states.save": ("save_all_states", "save_state"),
    "states.sharded_state": ("ShardedState",),
    "states.state": ("State",),
    "states.ready_made": (
        "CounterState",
        "EMAState",
        "ModuleState",
        "OptimizerState",
        "ScalerState",
        "SchedulerState",
        "StateDictState",
    ),
    "data.stream": ("ShardedStream",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__getattr__, __dir__ = exports(__name__, _MODULES)

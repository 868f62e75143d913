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
    from outlast.elastic.job.by_rank.per_rank import per_rank
    from outlast.elastic.job.job import Job
    from outlast.elastic.numerics.consistent_ddp import ConsistentDDP
    from outlast.elastic.silent_faults.finite_check import FiniteCheck
    from outlast.elastic.silent_faults.replica_check import ReplicaCheck
    from outlast.elastic.silent_faults.straggler_check import StragglerCheck
    from outlast.elastic.states.gathered import RandomState, ShardedState
    from outlast.elastic.states.loading import load_all_states, load_state
    from outlast.elastic.states.ready_made import (
        CounterState,
        EMAState,
        ModuleState,
        OptimizerState,
        ScalerState,
        SchedulerState,
        StateDictState,
    )
    from outlast.elastic.states.saving import PendingSave, save_all_states, save_state
    from outlast.elastic.states.state import State

__all__ = [
    "ConsistentDDP",
    "CounterState",
    "EMAState",
    "ElasticLoader",
    "ElasticSampler",
    "FiniteCheck",
    "Job",
    "ModuleState",
    "OptimizerState",
    "PendingSave",
    "RandomState",
    "ReplicaCheck",
    "ScalerState",
    "SchedulerState",
    "ShardedState",
    "ShardedStream",
    "State",
    "StateDictState",
    "StragglerCheck",
    "checkpoint_path",
    "from_ray",
    "load_all_states",
    "load_state",
    "num_replicas",
    "num_restarts",
    "per_rank",
    "replica_rank",
    "save_all_states",
    "save_state",
]

_MODULES = {
    "data.loader": "ElasticLoader",
    "data.sampler": "ElasticSampler",
    "data.stream": "ShardedStream",
    "environment": "checkpoint_path from_ray num_replicas num_restarts replica_rank",
    "job.by_rank.per_rank": "per_rank",
    "job.job": "Job",
    "numerics.consistent_ddp": "ConsistentDDP",
    "silent_faults.finite_check": "FiniteCheck",
    "silent_faults.replica_check": "ReplicaCheck",
    "silent_faults.straggler_check": "StragglerCheck",
    "states.gathered": "RandomState ShardedState",
    "states.loading": "load_all_states load_state",
    "states.ready_made": "CounterState EMAState ModuleState OptimizerState ScalerState "
    "SchedulerState StateDictState",
    "states.saving": "PendingSave save_all_states save_state",
    "states.state": "State",
}

__getattr__, __dir__ = exports(__name__, _MODULES)

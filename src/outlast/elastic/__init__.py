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
    "ConsistentDDP": "numerics.consistent_ddp",
    "CounterState": "states.ready_made",
    "EMAState": "states.ready_made",
    "ElasticLoader": "data.loader",
    "ElasticSampler": "data.sampler",
    "FiniteCheck": "silent_faults.finite_check",
    "Job": "job.job",
    "ModuleState": "states.ready_made",
    "OptimizerState": "states.ready_made",
    "PendingSave": "states.saving",
    "RandomState": "states.gathered",
    "ScalerState": "states.ready_made",
    "ReplicaCheck": "silent_faults.replica_check",
    "SchedulerState": "states.ready_made",
    "ShardedState": "states.gathered",
    "ShardedStream": "data.stream",
    "State": "states.state",
    "StateDictState": "states.ready_made",
    "StragglerCheck": "silent_faults.straggler_check",
    "checkpoint_path": "environment",
    "from_ray": "environment",
    "load_all_states": "states.loading",
    "load_state": "states.loading",
    "num_replicas": "environment",
    "num_restarts": "environment",
    "per_rank": "job.by_rank.per_rank",
    "replica_rank": "environment",
    "save_all_states": "states.saving",
    "save_state": "states.saving",
}

__getattr__, __dir__ = exports(__name__, _MODULES)

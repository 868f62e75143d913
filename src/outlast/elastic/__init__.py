"""Elastic state: saved by a job of one size, loaded by a job of any other size.

An import has no side effects, and each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.system.lazy_exports import exports

if TYPE_CHECKING:
    from outlast.elastic.data.loader import ElasticLoader as ElasticLoader
    from outlast.elastic.data.sampler import ElasticSampler as ElasticSampler
    from outlast.elastic.data.stream import ShardedStream as ShardedStream
    from outlast.elastic.environment import checkpoint_path as checkpoint_path
    from outlast.elastic.environment import from_ray as from_ray
    from outlast.elastic.environment import num_replicas as num_replicas
    from outlast.elastic.environment import num_restarts as num_restarts
    from outlast.elastic.environment import replica_rank as replica_rank
    from outlast.elastic.job.by_rank.per_rank import per_rank as per_rank
    from outlast.elastic.job.job import Job as Job
    from outlast.elastic.numerics.consistent_ddp import ConsistentDDP as ConsistentDDP
    from outlast.elastic.silent_faults.finite_check import FiniteCheck as FiniteCheck
    from outlast.elastic.silent_faults.replica_check import ReplicaCheck as ReplicaCheck
    from outlast.elastic.silent_faults.straggler_check import StragglerCheck as StragglerCheck
    from outlast.elastic.states.gathered import RandomState as RandomState
    from outlast.elastic.states.gathered import ShardedState as ShardedState
    from outlast.elastic.states.loading import load_all_states as load_all_states
    from outlast.elastic.states.loading import load_state as load_state
    from outlast.elastic.states.ready_made import CounterState as CounterState
    from outlast.elastic.states.ready_made import EMAState as EMAState
    from outlast.elastic.states.ready_made import ModuleState as ModuleState
    from outlast.elastic.states.ready_made import OptimizerState as OptimizerState
    from outlast.elastic.states.ready_made import ScalerState as ScalerState
    from outlast.elastic.states.ready_made import SchedulerState as SchedulerState
    from outlast.elastic.states.ready_made import StateDictState as StateDictState
    from outlast.elastic.states.saving import PendingSave as PendingSave
    from outlast.elastic.states.saving import save_all_states as save_all_states
    from outlast.elastic.states.saving import save_state as save_state
    from outlast.elastic.states.state import State as State

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

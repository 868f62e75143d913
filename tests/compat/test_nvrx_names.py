"""Names and signatures of nvidia-resiliency-ext 0.4, from a table of facts."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from outlast.compat import nvrx

# By module: each name, with its parameters ("name" or "name=" for one that has a default).
FACTS = {
    "inprocess": {
        "Wrapper": "store_factory= store_kwargs= initialize= abort= finalize= health_check= "
        "rank_assignment= rank_filter= monitor_thread_interval= monitor_process_interval= "
        "heartbeat_interval= progress_watchdog_interval= soft_timeout= hard_timeout= "
        "heartbeat_timeout= barrier_timeout= completion_timeout= last_call_wait= "
        "termination_grace_time= monitor_process_logfile= enabled= completion= terminate=",
        "State": "rank world_size active_rank= active_world_size= initial_rank= "
        "initial_world_size= iteration= mode= fn_exception=",
        "FrozenState": "rank world_size active_rank= active_world_size= initial_rank= "
        "initial_world_size= iteration= mode= fn_exception=",
    },
    "inprocess.initialize": {
        "RetryController": "max_iterations= min_world_size= min_active_world_size="
    },
    "inprocess.abort": {"AbortTorchDistributed": "", "AbortTransformerEngine": ""},
    "inprocess.finalize": {"ThreadedFinalize": "timeout fn args= kwargs="},
    "inprocess.health_check": {"CudaHealthCheck": "timeout=", "FaultCounter": "max_rank_faults="},
    "inprocess.rank_assignment": {
        "RankAssignmentCtx": "state store terminated_ranks",
        "ActivateAllRanks": "",
        "MaxActiveWorldSize": "max_active_world_size=",
        "ActiveWorldSizeDivisibleBy": "divisor=",
        "ShiftRanks": "",
        "FillGaps": "",
        "FilterCountGroupedByKey": "key_or_fn condition timeout=",
        "Layer": "min_ranks= max_ranks= key_or_fn= flag=",
        "Tree": "layers world_size_filter=",
    },
    "inprocess.rank_filter": {
        "MaxActiveWorldSize": "max_active_world_size=",
        "ActiveWorldSizeDivisibleBy": "divisor=",
    },
    "inprocess.nested_restarter": {
        "NestedRestarterCallback": "restarter_state restarter_stage= logger= special_rank=",
        "NestedRestarterHandlingCompleted": "special_rank=",
        "NestedRestarterHandlingStarting": "restarter_state= restarter_stage= logger= "
        "special_rank=",
        "NestedRestarterFinalized": "restarter_state= restarter_stage= logger= special_rank=",
        "NestedRestarterAborted": "restarter_state= restarter_stage= logger= special_rank=",
    },
    "inprocess.attribution": {"InterruptionRecord": "rank interruption"},
    "inprocess.tools.inject_fault": {
        "inject_fault": "faults num_faults keep_alive delay seed callback=",
        "dispatch_fault_injection": "fault delay callback",
        "maybe_raise_workload_exception": "",
        "clear_workload_exception": "",
    },
    "checkpointing.async_ckpt.core": {
        "AsyncCallsQueue": "persistent=",
        "AsyncCallsQueue.schedule_async_request": "self async_request",
        "AsyncCallsQueue.maybe_finalize_async_calls": "self blocking= no_dist=",
        "AsyncCallsQueue.close": "self",
        "AsyncCaller.schedule_async_call": "self async_req",
        "AsyncCaller.is_current_async_call_done": "self blocking= no_dist=",
        "AsyncCaller.sync_all_async_calls": "self is_alive",
        "AsyncCaller.close": "self",
        "TemporalAsyncCaller": "",
        "TemporalAsyncCaller.schedule_async_call": "self async_req",
        "PersistentAsyncCaller": "",
        "PersistentAsyncCaller.is_current_async_call_done": "self blocking= no_dist=",
        "AsyncRequest": "async_fn async_fn_args finalize_fns async_fn_kwargs= preload_fn= "
        "is_frozen= call_idx=",
    },
    "checkpointing.async_ckpt.torch_ckpt": {
        "TorchAsyncCheckpoint": "persistent_queue=",
        "TorchAsyncCheckpoint.finalize_async_save": "self blocking= no_dist= terminate=",
    },
}
OPTIONS = "is_daemon= cpu_priority= io_priority= sigterm_timeout= cpu_shm_mode="
# What has changed up to the newest version (0.7).
LATER = {
    "shared_utils.inject_fault": FACTS["inprocess.tools.inject_fault"],
    "checkpointing.async_ckpt.core": {
        "AsyncRequest": FACTS["checkpointing.async_ckpt.core"]["AsyncRequest"],
        "AsyncCallsQueue": f"persistent= {OPTIONS}",
        "AsyncCallsQueue.close": "self abort=",
        "AsyncCaller.close": "self abort=",
        "TemporalAsyncCaller.close": "self abort=",
        "PersistentAsyncCaller": OPTIONS,
        "PersistentAsyncCaller.close": "self abort=",
    },
    "checkpointing.async_ckpt.torch_ckpt": {"TorchAsyncCheckpoint.close": "self abort="},
}
NAMES = {
    "inprocess": "abort completion exception finalize health_check initialize monitor_thread "
    "nested_restarter rank_assignment state terminate tools Compose CallWrapper Mode",
    "inprocess.monitor_thread": "RankShouldRestart",
    "inprocess.exception": "RestartError RestartAbort HealthCheckError InternalError TimeoutError",
    "inprocess.completion": "Completion",
    "inprocess.terminate": "Terminate",
    "inprocess.initialize": "Initialize",
    "inprocess.abort": "Abort",
    "inprocess.finalize": "Finalize",
    "inprocess.health_check": "HealthCheck FaultCounterExceeded",
    "inprocess.rank_assignment": "RankAssignment RankFilter RankDiscarded LayerFlag",
    "inprocess.rank_filter": "RankFilter WorldSizeDivisibleBy",
    "inprocess.store": "StoreMixin TCPStore FileStore PrefixStore",
}
DEFAULTS_S = {
    "monitor_thread_interval": 1,
    "monitor_process_interval": 1,
    "heartbeat_interval": 1,
    "progress_watchdog_interval": 1,
    "soft_timeout": 60,
    "hard_timeout": 90,
    "heartbeat_timeout": 30,
    "barrier_timeout": 120,
    "completion_timeout": 120,
    "last_call_wait": 1,
    "termination_grace_time": 5,
}


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (module, name, text)
        for facts in (FACTS, LATER)
        for module, names in facts.items()
        for name, text in names.items()
    ],
)
def test_a_signature_begins_as_the_facts_say(module: str, name: str, expected: str) -> None:
    found: Any = importlib.import_module(f"outlast.compat.nvrx.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()
    text = [p.name + ("" if p.default is p.empty else "=") for p in parameters]
    named = [p for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD]
    length = len(expected.split())
    assert text[:length] == expected.split()
    assert all(each.endswith("=") for each in text[length:])
    assert name == "Wrapper" or not {p.name for p in named} & {w.strip("=") for w in text[:length]}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_there(module: str) -> None:
    found = importlib.import_module(f"outlast.compat.nvrx.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []
    exported = set(getattr(found, "__all__", ()))
    assert set(NAMES[module].split()) <= exported


def test_the_durations_are_those_of_the_facts() -> None:
    inprocess = importlib.import_module("outlast.compat.nvrx.inprocess")
    parameters = inspect.signature(inprocess.Wrapper).parameters
    found = {name: parameters[name].default.total_seconds() for name in DEFAULTS_S}
    assert found == DEFAULTS_S
    assert [f.name for f in dataclasses.fields(inprocess.FrozenState)] == [
        f.name for f in dataclasses.fields(inprocess.State)
    ]
    assert [m.name for m in inprocess.Mode] == ["INITIALIZED", "ACTIVE", "INACTIVE", "TERMINATED"]


@pytest.fixture
def old_import(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the old package, which is not imported, and is forgotten afterwards."""
    name = "nvidia_resiliency_ext"
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = {key: sys.modules.pop(key) for key in [*sys.modules] if key.startswith(name)}
    yield name
    for key in [key for key in sys.modules if key.startswith(name)]:
        del sys.modules[key]
    sys.modules.update(before)


def test_installed_it_stands_in_for_the_old_import(old_import: str) -> None:
    for _ in range(2):
        nvrx.install()
    inprocess = importlib.import_module(f"{old_import}.inprocess")
    policies = importlib.import_module(f"{old_import}.inprocess.rank_assignment")
    assert policies is inprocess.rank_assignment is nvrx.inprocess.rank_assignment
    assert importlib.import_module(f"{old_import}.checkpointing.async_ckpt.core").AsyncRequest
    faults = importlib.import_module(f"{old_import}.inprocess.tools.inject_fault")
    assert faults is importlib.import_module(f"{old_import}.shared_utils.inject_fault")
    with pytest.raises(ModuleNotFoundError, match=f"{old_import}.attribution"):
        importlib.import_module(f"{old_import}.attribution")
    assert sum("_Finder" in repr(finder) for finder in sys.meta_path) == 1


def test_installed_it_is_not_taken_for_a_later_version(old_import: str) -> None:
    """Megatron-core 0.18 and later look for four modules, and then assert that the version is 0.6
    or later.
    """
    nvrx.install()
    package = importlib.import_module(old_import)
    assert package.__version__ == "0.4.1"
    where = f"{old_import}.checkpointing.async_ckpt"
    for name in ("core", "filesystem_async", "state_dict_saver"):
        importlib.import_module(f"{where}.{name}")
    missing = ["monitor_process", "param_utils", "progress_watchdog", "sibling_monitor", "utils"]
    for name in (
        f"{where}.cached_metadata_filesystem_reader",
        f"{old_import}.shared_utils.log_manager",
        *(f"{old_import}.inprocess.{each}" for each in missing),
    ):
        with pytest.raises(ModuleNotFoundError, match=r"no counterpart .*docs/migration\.md") as e:
            importlib.import_module(name)
        assert e.value.name == name


def test_the_real_package_is_not_replaced(old_import: str) -> None:
    sys.modules[old_import] = types.ModuleType(old_import)
    with pytest.raises(RuntimeError, match="imported already"):
        nvrx.install()
    assert len([f for f in sys.meta_path if "_Finder" in repr(f)]) == 0

"""The exported names are exactly the documented ones."""

from __future__ import annotations

import importlib

import pytest

import outlast.errors
from outlast import inprocess

SPEC = {
    "": {
        "Wrapper", "CallWrapper", "Compose", "State", "Status",
        "RankShouldRestart", "RestartError", "HealthCheckError", "InternalError",
        "RestartAbort",
        # Beyond the API that users know:
        "Adaptive", "GrowPolicy", "RepeatedFaults", "Timeouts", "UnrecoverableFault",
        # The parts:
        "abort", "attribution", "ending", "exception", "finalize", "health_check", "initialize",
        "rank_assignment", "rank_filter", "state", "store",
    },
    "state": {"State", "Status"},
    "initialize": {"Initialize", "RetryController"},
    "abort": {"Abort", "AbortTorchDistributed", "AbortTransformerEngine"},
    "ending": {"Completion", "Terminate"},
    "finalize": {"Finalize", "ThreadedFinalize"},
    "health_check": {
        "HealthCheck", "CudaHealthCheck", "DeviceHealthCheck", "FaultCounter",
        "FaultCounterExceeded",
    },
    "rank_assignment": {
        "RankAssignment", "ShiftRanks", "FillGaps", "FilterGroupedByKey", "RankDiscarded",
        "AwaitReplacements",
    },
    "rank_filter": {"RankFilter", "MaxActiveWorldSize", "WorldSizeDivisibleBy"},
    "attribution": {"Interruption", "InterruptionRecord"},
    "exception": {
        "RestartError", "HealthCheckError", "InternalError", "RankTimeout", "RestartAbort",
        "RankShouldRestart", "UnrecoverableFault",
    },
    "store": {"StoreMixin", "TCPStore", "PrefixStore", "FileStore"},
}  # fmt: skip
# For the rest of the package, not documented.
INTERNAL = {
    "state": {"LazyStore"},
    "abort": {"release"},
    "finalize": {"run_within"},
    "rank_assignment": {"MarkedRanks"},
    # Raised by parts that are ours, or seen in tracebacks only.
    "exception": {
        "FaultCounterExceeded",
        "RankDiscarded",
        "RankFault",
        "RankLostError",
        "StoreError",
    },
}


@pytest.mark.parametrize("part", SPEC)
def test_a_module_exports_what_is_documented(part: str) -> None:
    module = importlib.import_module(f"outlast.inprocess.{part}".rstrip("."))
    exported = set(module.__all__)
    internal = INTERNAL.get(part, set())
    assert SPEC[part] <= exported
    assert exported - SPEC[part] <= internal
    for name in exported:
        assert hasattr(module, name)


def test_the_exceptions_are_related_as_documented() -> None:
    assert inprocess.exception.TimeoutError is outlast.errors.RankTimeout
    for name in ("HealthCheckError", "InternalError", "RankTimeout"):
        assert issubclass(getattr(inprocess.exception, name), inprocess.RestartError)
    assert issubclass(inprocess.RestartError, Exception)
    for base in (inprocess.RestartAbort, inprocess.RankShouldRestart):
        assert issubclass(base, BaseException)
        assert not issubclass(base, Exception)
    assert inprocess.rank_assignment.RankDiscarded is outlast.errors.RankDiscarded


def test_statuses_and_interruptions() -> None:
    assert [s.name for s in inprocess.Status] == [
        "INITIALIZED", "ACTIVE", "INACTIVE", "ABORTING", "ABORTED",
    ]  # fmt: skip
    assert {i.name for i in inprocess.attribution.Interruption} == {
        "EXCEPTION", "BASE_EXCEPTION", "SOFT_TIMEOUT", "HARD_TIMEOUT", "TERMINATED",
        "UNRESPONSIVE",
    }  # fmt: skip

"""`JobLog`: what stays in the agents' store."""

from __future__ import annotations

from collections.abc import Callable

from outlast.coordination.replicated.operations import Operation, OperationStore, Result
from outlast.coordination.replicated.table import Table
from outlast.launch.hosts.job.job_log import JobLog
from outlast.launch.hosts.plan import JobPlan


class Store(OperationStore):
    """In memory."""

    def __init__(self) -> None:
        self._table = Table()

    @property
    def table(self) -> dict[str, bytes]:
        return self._table.keys

    def perform(self, operation: Operation, timeout: float | None = None) -> Result:
        return self._table.perform(operation)

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.table if key.startswith(prefix))


def test_the_keys_of_ended_attempts_are_deleted() -> None:
    store, sizes = Store(), []
    log = JobLog(store, "h1", "h1")
    for attempt in range(12):
        if attempt != 5:  # that host has died before it could
            log.forget_before(attempt - 1)
        store.put(f"w/{attempt}//outlast/job", b"{}")
        log.finish(attempt, frozenset([1]))
        assert log.take(JobPlan(attempt=attempt), "", 1) is not None
        log.clear(attempt)
        sizes.append(len(store.table))
    assert sizes[6:] == [sizes[6]] * 6
    assert {key.split("/")[1] for key in store.keys("w/")} == {"10", "11"}
    assert log.cleared(11) == {"h1"}


def plan(*hosts: str) -> JobPlan:
    return JobPlan(hosts=dict.fromkeys(hosts, None), used=1)  # type: ignore[arg-type]


def test_replacements_of_all_hosts_count_until_there_is_progress() -> None:
    store = Store()
    one, two = JobLog(store, "h1", "h1"), JobLog(store, "h2", "h2")
    both = plan("h1", "h2")
    assert one.take(both, "", 2) == 2  # a restart before counts, too
    assert two.take(both, "", 2) is None
    assert [two.take(both, "call/0", 2), one.take(both, "call/0", 2)] == [1, 2]
    assert two.take(both, "call/0", 2) is None
    assert two.used(both, "call/0") == one.used(both, "call/0") == 2
    assert two.used(plan("h2"), "call/0") == 1, "the loss of the host counts for its workers"
    assert one.take(both, "call/7", 2) == 1


def test_restarts_of_all_hosts_count_for_a_time() -> None:
    store, ends = Store(), list[Callable[[], None]]()

    def later(seconds: float, end: Callable[[], None]) -> None:
        assert seconds == 60.0
        ends.append(end)

    one, two = (JobLog(store, name, name, 60.0, later) for name in ("h1", "h2"))
    both = plan("h1", "h2")
    one.restarted(both)
    assert two.take(both, "call/0", 2) == 2
    assert one.take(both, "call/1", 2) is None
    assert [len(ends), two.used(both)] == [2, 2]
    ends.pop(0)()
    assert one.take(both, "call/1", 2) == 2

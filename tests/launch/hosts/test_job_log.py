"""`JobLog`: what stays in the agents' store."""

from __future__ import annotations

from outlast.coordination.stores.store import MemoryStore
from outlast.launch.hosts.job.job_log import JobLog


class Store(MemoryStore):
    """With the operations of a group's store."""

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.table if key.startswith(prefix))

    def delete_prefix(self, prefix: str) -> None:
        for key in self.keys(prefix):
            del self.table[key]


def test_the_keys_of_ended_attempts_are_deleted() -> None:
    store, sizes = Store(), []
    log = JobLog(store, "h1", "h1")
    for attempt in range(12):
        if attempt != 5:  # that host has died before it could
            log.forget_before(attempt - 1)
        store.put(f"w/{attempt}//outlast/job", b"{}")
        log.finish(attempt, frozenset([1]))
        log.replaced(attempt, 1)
        log.clear(attempt)
        sizes.append(len(store.table))
    assert sizes[6:] == [sizes[6]] * 6
    assert {key.split("/")[1] for key in store.keys("w/")} == {"10", "11"}
    assert log.cleared(11) == {"h1"}

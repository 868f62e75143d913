"""Counts the store operations of a rank during undisturbed training.

Each request that the clients of the main process and of its monitor process send counts.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from typing import Any

from benchmarks.lib.rank_processes import RankProcesses, wrapped
from outlast import inprocess
from outlast.coordination.stores import tcp_client
from outlast.coordination.stores.tcp_client import Query

__all__ = ["operations_at_rest"]

OPERATIONS = ("set", "get", "add", "append", "check", "wait", "compare_set", "delete_key")
_WHO = ("main", "monitor")

# The counts are shared with the monitor process, which is forked from the rank.
_counts: Any = None
_main_pid = 0


_request = tcp_client._request


def _counted(request: Query, *arguments: bytes) -> bytes:
    name = request.name.lower()
    if name in OPERATIONS:
        row = 0 if os.getpid() == _main_pid else 1
        _counts[row * len(OPERATIONS) + OPERATIONS.index(name)] += 1
    return _request(request, *arguments)


def operations_at_rest(ranks: int, seconds: float) -> dict[str, Any]:
    """Operations per second and rank, by process and kind; the mean over the ranks."""
    print(f"overhead: store operations at rest, {seconds} s", flush=True)
    with RankProcesses("rest", ranks) as processes:
        processes.start_all(lambda slot: _rank(slot, seconds, str(processes.folder)))
        processes.wait_all(120 + seconds)
        found = [
            json.loads((processes.folder / f"counts{slot}.json").read_text())
            for slot in range(ranks)
        ]
    result: dict[str, Any] = {"all": sum(map(sum, found)) / ranks / seconds}
    for row, who in enumerate(_WHO):
        result[who] = {}
        for column, name in enumerate(OPERATIONS):
            total = sum(counts[row * len(OPERATIONS) + column] for counts in found)
            if total:
                result[who][name] = total / ranks / seconds
    return result


def _rank(slot: int, seconds: float, folder: str) -> None:
    global _counts, _main_pid
    _counts = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    _main_pid = os.getpid()
    tcp_client._request = _counted  # the monitor process is forked from this one

    def train(call: inprocess.CallWrapper) -> list[int]:
        time.sleep(1.5)  # past the start and the first heartbeats
        before = _counts[: 2 * len(OPERATIONS)].tolist()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            call.ping()
            time.sleep(0.005)
        after = _counts[: 2 * len(OPERATIONS)].tolist()
        return [now - then for now, then in zip(after, before, strict=True)]

    counts = wrapped(train, inprocess.Wrapper())()
    with open(os.path.join(folder, f"counts{slot}.json"), "w") as file:
        json.dump(counts, file)

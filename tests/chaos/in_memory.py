"""Claims on faults in the memory of one process."""

from __future__ import annotations

from typing import Any

from outlast.chaos.fired_faults import MarkerDirectory


class MemoryFired(MarkerDirectory):
    def __init__(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}

    def claim(self, key: str, record: dict[str, Any]) -> bool:
        return self._records.setdefault(key, record) is record

    def release(self, key: str) -> None:
        self._records.pop(key, None)

    def records(self) -> list[dict[str, Any]]:
        return sorted(self._records.values(), key=lambda record: float(record["time"]))

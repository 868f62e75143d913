"""What an injector needs, in the memory of one process: claims on faults, and a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outlast.chaos.fired_faults import MarkerDirectory


@dataclass
class State:
    rank: int = 0


@dataclass
class Call:
    iteration: int = 0
    state: State = field(default_factory=State)
    monitor_pid: int | None = 4321


class MemoryFired(MarkerDirectory):
    def __init__(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}

    def claim(self, key: str, record: dict[str, Any]) -> bool:
        return self._records.setdefault(key, record) is record

    def release(self, key: str) -> None:
        self._records.pop(key, None)

    def records(self) -> list[dict[str, Any]]:
        return sorted(self._records.values(), key=lambda record: float(record["time"]))

"""Restart latency of nvidia-resiliency-ext's `inprocess.Wrapper`, on the same function and faults.

It waits for the timeout of gloo, 30 minutes by default, so it is measured with 20 s and with 1 s,
the smallest practical value. It does not replace a killed rank, so each fault is a separate job.
Rank 0 is never killed, because it serves the store.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.util
import os
import time
import warnings
from typing import Any

import torch.distributed as dist

from benchmarks.lib.faults import RANKS, body
from benchmarks.lib.rank_processes import RankProcesses, free_port, serve, store, wrapped
from benchmarks.lib.timestamp_board import TimestampBoard

__all__ = ["SETTINGS", "Setting", "available", "measure"]

SERVER = -1
_INTERVALS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "last_call_wait",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The peer's settings: its intervals (`None`: defaults), and the timeout of gloo."""

    interval_s: float | None
    gloo_s: float

    @property
    def name(self) -> str:
        intervals = "defaults" if self.interval_s is None else f"{self.interval_s * 1000:.0f} ms"
        return f"{intervals}, gloo timeout {self.gloo_s:.0f} s"


SETTINGS = (Setting(None, 20.0), Setting(0.01, 20.0), Setting(None, 1.0), Setting(0.01, 1.0))


def available() -> bool:
    """Whether the peer is installed."""
    return importlib.util.find_spec("nvidia_resiliency_ext") is not None


def measure(kind: str, setting: Setting, faults: int, cap_s: float) -> list[float | None]:
    """Seconds per fault; `None` if the survivors were not back within `cap_s`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a dependency of the peer
        library = importlib.import_module("nvidia_resiliency_ext.inprocess")
    return [_patiently(library, kind, setting, cap_s) for _ in range(faults)]


class NotReady(RuntimeError):
    """The job did not reach its fault."""


def _patiently(library: Any, kind: str, setting: Setting, cap_s: float) -> float | None:
    """Retries: with a gloo timeout of 1 s, groups do not always connect on a busy machine."""
    for _ in range(2):
        try:
            return _one(library, kind, setting, cap_s)
        except NotReady as e:
            print(str(e).partition("\n")[0] + ", another try", flush=True)
    return _one(library, kind, setting, cap_s)


def _one(library: Any, kind: str, setting: Setting, cap_s: float) -> float | None:
    board, port = TimestampBoard(RANKS, 16), free_port()
    with RankProcesses(f"peer-{kind}", RANKS) as processes:
        processes.start(SERVER, lambda: serve(port))
        processes.start_all(lambda slot: _rank(library, board, slot, kind, setting, port))
        deadline = time.monotonic() + 60.0
        while (fault := board.fault(0)) is None:
            processes.ended(0.05)
            if time.monotonic() > deadline:
                raise NotReady(f"the peer did not come to its fault\n{processes.last_output()}")
        moment, victim = fault
        survivors = set(range(RANKS)) - ({victim} if kind == "sigkill" else set())
        while set(entries := board.entries_after(moment)) < survivors:
            if time.monotonic() > moment + cap_s:
                return None
            time.sleep(0.02)
        return max(entries[slot] for slot in survivors) - moment


def _rank(
    library: Any, board: TimestampBoard, slot: int, kind: str, setting: Setting, port: int
) -> None:
    options: dict[str, Any] = {}
    if setting.interval_s is not None:
        options = dict.fromkeys(_INTERVALS, datetime.timedelta(seconds=setting.interval_s))

    def train(call: Any = None) -> None:
        iteration = call.iteration

        def join_group() -> None:
            prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
            dist.init_process_group(
                "gloo",
                store=prefixed(f"{iteration}", store(port)),
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                timeout=datetime.timedelta(seconds=setting.gloo_s),
            )

        body(board, slot, iteration, kind, 1, join_group, first=1)

    train.__annotations__["call"] = library.CallWrapper
    wrapped(train, library.Wrapper(**options))()

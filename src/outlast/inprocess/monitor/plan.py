"""What the main process tells its monitor process when it forks it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from outlast.inprocess.progress.shared_page import SharedPage
from outlast.inprocess.store import StoreMixin

__all__ = ["MonitorPlan"]


@dataclasses.dataclass(frozen=True)
class MonitorPlan:
    """What the monitor process needs to know. Durations are in seconds.

    Attributes:
        page: shared with the main process.
        factory, kwargs, endpoint: the store; `serve` if this monitor is to serve it; `ready` is a
            key that its server sets for this call, or an empty string.
        prefix: of the call's keys.
        rank, world_size, token: what the main process registers with.
        interval, heartbeat: of the heartbeat, and when a member without one is lost.
        soft, hard, grace: progress timeouts, and the pause between SIGTERM and SIGKILL.
        patience: for reaching the store.
        logfile: for what it has to say; nowhere by default.
        events_dir: where to write events, or an empty string.
        address: of this host, where the store of an iteration is served.
    """

    page: SharedPage
    factory: type[StoreMixin]
    kwargs: Mapping[str, Any]
    endpoint: tuple[str, int] | None
    serve: bool
    ready: str
    prefix: str
    rank: int
    world_size: int
    token: str
    interval: float
    heartbeat: float
    soft: float
    hard: float
    grace: float
    patience: float
    logfile: str | None
    events_dir: str
    address: str = ""

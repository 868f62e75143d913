"""`MonitorPlan`: everything that the monitor process needs to know, fixed before the fork."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from outlast.coordination.decisions.decision import Rules
from outlast.inprocess.progress.shared_page import SharedPage
from outlast.inprocess.store import StoreMixin


@dataclasses.dataclass(frozen=True)
class MonitorPlan:
    """The configuration of one monitor process. Durations are in seconds.

    Attributes:
        factory, kwargs, endpoint: of the store.
        serve: whether this monitor serves the store.
        ready: the key that the store's server sets for this call, or an empty string.
        rank, world_size, token, rules: the values with which the main process registers.
        interval: time between two heartbeats.
        heartbeat: a member without a heartbeat for this long counts as lost.
        soft, hard, ping: the timeouts.
        grace: time between SIGTERM and SIGKILL.
        patience: maximum time to reach the store.
        logfile: gets the output of the monitor process; `None` discards it.
        address: this host's address, on which an iteration's store is served.
        host_id: of this host among those of the job; empty for a job on one host.
        host_ring: whether members watch only those on the same host, whose launcher has a lease.
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
    ping: float
    grace: float
    patience: float
    logfile: str | None
    events_dir: str
    address: str = ""
    host_id: str = ""
    host_ring: bool = False
    rules: Rules = dataclasses.field(default_factory=Rules)

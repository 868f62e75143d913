"""The events of launchers: their worker processes, and the hosts of the job."""

from __future__ import annotations

import dataclasses

from outlast.events.types.base import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class LauncherStarted(Event, kind="launcher_started"):
    """The launcher of this host begins the job `run_id`; `command` is the script and its arguments
    as one would type them.
    """

    run_id: str = ""
    command: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event, kind="worker_started"):
    """The launcher started a process. `attempt` counts from 0 for each local rank. `standby`:
    whether it was a standby process before.
    """

    worker_pid: int = -1
    attempt: int = 0
    standby: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerExited(Event, kind="worker_exited"):
    """A process of the launcher ended; `exit_code` is negative for a signal."""

    worker_pid: int = -1
    exit_code: int = 0
    last_words: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFailed(Event, kind="worker_failed"):
    """A process of the launcher failed, and what the launcher did: `decision` is a value of
    `outlast.launch.agent.decisions.Decision`. `failed_time` is when the process failed, which may
    be before its end; `message` is the last line of its traceback or of its standard error.
    """

    worker_pid: int = -1
    exit_code: int = 0
    decision: str = ""
    failed_time: float = 0.0
    message: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostJoined(Event, kind="host_joined"):
    """A launcher has learned that a host has joined the job."""

    host_id: str = ""
    name: str = ""
    address: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLost(HostJoined, kind="host_lost"):
    """A launcher has learned that a host is lost, or has `left` in an orderly way."""

    reason: str = ""
    left: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LauncherEnded(Event, kind="launcher_ended"):
    """The job is over and its launcher on this host exits with `exit_code`; `cause` says why it has
    failed, in one line. A launcher that was killed writes none.
    """

    exit_code: int = 0
    cause: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedFault(Event, kind="planned_fault"):
    """A fault of the plan of `outlast run --chaos`, written by the launcher when the job ends.

    If it has `fired`, the other fields of the event say where and when. If not, `rank` is the
    planned one. `name` is its kind, `key` its position in the plan, `due` its conditions in words.
    """

    key: str = ""
    name: str = ""
    due: str = ""
    fired: bool = False

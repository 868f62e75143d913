"""What the launcher says about the hosts of its job: each thing once."""

from __future__ import annotations

from collections.abc import Callable

from outlast.coordination.replicated.hosts import HostInfo
from outlast.events import Emitter, HostJoined, HostLost
from outlast.launch.hosts.host_group import GroupState
from outlast.launch.hosts.job.decider import Wait, loss_text
from outlast.system.units import duration_text

_LONG_S = 5.0
"""A wait is told after so long, and again after so long if it has changed."""


class WaitNotice:
    """Lines about what the job waits for: when a wait has lasted a while, and when it is over.
    `said` is whether a wait was told whose end was not.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since: float | None = None
        self._last, self._last_at = "", 0.0
        self.said = False

    def waiting(self, wait: Wait | None, now: float) -> None:
        """Tell what the job waits for now; `None` for nothing."""
        if wait is None:
            if self.said and self._since is not None:
                self._say(f"the wait is over, after {duration_text(now - self._since)}")
            self.forget()
            return
        if self._since is None:
            self._since = self._last_at = now
        text = f"{wait.what}; {wait.then}"
        if text == self._last or (not wait.at_once and now - self._last_at < _LONG_S):
            return
        self._last, self._last_at, self.said = text, now, True
        until = "" if wait.until is None else f"; in {duration_text(wait.until - now)} {wait.then}"
        self._say(f"waiting for {wait.what}{until}")

    def forget(self) -> None:
        """Nothing is waited for any more, and nothing is to be said of it."""
        self._since, self.said, self._last = None, False, ""


class GroupNotices:
    """Lines and events about hosts that join, are lost, or lead."""

    def __init__(self, say: Callable[[str], None], emitter: Emitter) -> None:
        self._say, self._emitter = say, emitter
        self._joined: set[str] = set()
        self._lost = 0
        self._refused = 0
        self._leader = ""

    def changed(self, group: GroupState) -> None:
        """Tell what is new in the state of the group."""
        first = not self._joined
        came = [host for host in group.hosts if host.id not in self._joined]
        came += [loss.host for loss in group.lost if loss.host.id not in self._joined]
        if came:
            # When this host joins, others may be gone already: only the events tell of those.
            said = [host for host in came if host in group.hosts] if first else came
            self._joined.update(host.id for host in came)
            self._say(f"joined: {hosts_text(said)}; hosts in the job: {len(group.hosts)}")
        for host in came:
            joined = HostJoined(host_id=host.id, name=host.name, address=host.address)
            self._emitter.emit(joined)
        for loss in group.lost[self._lost :]:
            if not first:
                self._say(loss_text(loss))
            lost = HostLost(
                host_id=loss.host.id,
                name=loss.host.name,
                address=loss.host.address,
                reason=loss.reason,
                left=loss.left,
            )
            self._emitter.emit(lost)
        self._lost = len(group.lost)
        for line in group.refused[self._refused :]:
            self._say(line)
        self._refused = len(group.refused)
        if group.leader and group.leader != self._leader:
            self._leader = group.leader
            names = [host.name for host in group.hosts if host.id == group.leader]
            if names:
                self._say(f"{names[0]} leads the hosts (term {group.term})")


def hosts_text(hosts: list[HostInfo]) -> str:
    """The names and addresses of hosts; of many, the first few."""
    shown = ", ".join(f"{host.name} ({host.address})" for host in hosts[:8])
    return shown if len(hosts) <= 8 else f"{shown} and {len(hosts) - 8} more"

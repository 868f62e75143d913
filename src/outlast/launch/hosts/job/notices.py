"""What the launcher says about the hosts of its job: each thing once."""

from __future__ import annotations

from collections.abc import Callable

from outlast.events import Emitter, HostJoined, HostLost
from outlast.launch.hosts.host_group import GroupState, HostInfo
from outlast.launch.hosts.job.decider import loss_text


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

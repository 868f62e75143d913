"""Which hosts the leader admits to the group."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.coordination.replicated.hosts import HostInfo
from outlast.launch.hosts.replicated.messages import NotYet, Refused
from outlast.system.sockets import is_loopback

_TEXT_CHARS = 200


def objection(
    candidate: HostInfo, leader: HostInfo, hosts: Iterable[HostInfo], lost_after_s: float
) -> Refused | NotYet | None:
    """Why `candidate` is not admitted now; `None` if it is.

    Args:
        hosts: those in the group.
        lost_after_s: after this time without a sign of life, a host of the group is lost.
    """
    names = [*leader.settings, *(n for n in candidate.settings if n not in leader.settings)]
    for name in names:
        ours, theirs = leader.settings.get(name), candidate.settings.get(name)
        if ours != theirs:
            return Refused(
                name,
                f"{name} differs between the hosts of this run: {leader.name} has {_text(ours)}, "
                f"{candidate.name} has {_text(theirs)}",
            )
    if is_loopback(candidate.address) and not is_loopback(leader.address):
        return Refused(
            "--local-addr",
            f"the address of {candidate.name} is {candidate.address}, a loopback address, which "
            "other hosts cannot reach: give --local-addr",
        )
    for host in hosts:
        if host.address == candidate.address and host.id != candidate.id:
            return NotYet(
                f"{host.name} at {host.address} is already in this run, with another agent "
                f"({host.id}): do two jobs use one run id (--rdzv-id)? If that agent has ended, "
                "this one is admitted when its lease is over; several agents on one machine need "
                "different addresses (--local-addr)",
                # An agent that has ended is lost by then.
                limit_s=2.0 * lost_after_s + 1.0,
            )
    return None


def _text(value: str | None) -> str:
    if value is None:
        return "none"
    return repr(value if len(value) <= _TEXT_CHARS else value[:_TEXT_CHARS] + " ...")

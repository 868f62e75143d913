"""The host group as an agent sees it: one chain of entries, and the store that all share.

Two implementations: over the agents' own consensus (`--rdzv-backend c10d`) and over etcd. In both,
hosts join and are lost by entries of the chain, and the agents' decisions are entries of it.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.operations import OperationStore
from outlast.coordination.stores.store import Store
from outlast.launch.config.secret import Secret
from outlast.launch.hosts.plan import Asked, Entry, JobPlan, decode
from outlast.system.lease_page import LeasePage
from outlast.system.sockets import is_loopback

_TEXT_CHARS = 200
_LEASE_SETTING = "--host-timeout"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What an agent needs to find its group."""

    run_id: str  # the group's name; hosts with another run id are never members of it
    # host and port of each, in the order of the command line
    endpoints: tuple[tuple[str, int], ...]
    page: LeasePage  # the lease page that the group renews
    # the address of this host for the others; `None` finds it from the routes
    local_addr: str | None = None
    lease_s: float = 5.0  # how long a host may be silent before the others go on without it
    join_limit_s: float = 600.0  # how long `HostGroup.start` tries
    # what must be equal on all hosts, in the order in which it is compared: name (as the user knows
    # it, `--nproc-per-node` for example) and value. A refusal names the first that differs.
    settings: tuple[tuple[str, str], ...] = ()
    place: int = -1  # the place that this host asks for (`--node-rank`); -1 for any
    topology: tuple[str, ...] = ()  # where this host is in the network, see `rank_order`
    # further settings of the backend (`--rdzv-conf`)
    conf: Mapping[str, str] = dataclasses.field(default_factory=dict)
    say: Callable[[str], None] = lambda line: None  # prints a line for the user
    # of the job, for the connections between hosts; `None` if it has none
    secret: Secret | None = None

    def host(self, address: str = "", store_port: int = 0) -> HostInfo:
        """This host, under an ID that no other one has or will have."""
        name = socket.gethostname()
        return HostInfo(
            id=f"{name}-{secrets.token_hex(6)}",
            name=name,
            address=address,
            store_port=store_port,
            place=self.place,
            topology=self.topology,
            settings={**dict(self.settings), _LEASE_SETTING: f"{self.lease_s:g}"},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupState:
    """What this host knows of the group."""

    # the entries, as far as this host has received them; it grows, and never changes
    chain: Sequence[Entry] = ()
    # id of the host that decides for the group; empty if this host knows of none. Two hosts may see
    # different leaders for a moment: a decision is a claim in the chain.
    leader: str = ""
    term: int = 0  # of the leader
    error: str = ""  # why this host must not act any more; empty while it may
    # lines about hosts that this host did not admit, with the setting that is wrong
    refused: tuple[str, ...] = ()
    # which hosts are to leave and ranks to move, as this one was asked to say; it grows
    asked: tuple[Asked, ...] = ()


class HostGroup(Protocol):
    """The membership of one agent in the group of its job."""

    @property
    def me(self) -> HostInfo:
        """This host; known after `start`."""

    @property
    def store(self) -> OperationStore:
        """The agents' keys. Raises `StoreError` naming the cause once the lease is over."""

    @property
    def workers(self) -> Store:
        """The keys of this host's workers, as in `new_attempt`; asked through the server that they
        use too, after all that they have sent by then.
        """

    def start(self) -> None:
        """Join the group, or found it. The chain then has the entry of this host. A `LaunchError`
        naming the endpoint and the reason, after at most `join_limit_s`.
        """

    def wakeup_fd(self) -> int:
        """A descriptor that is readable when the state has changed; `poll` makes it unreadable."""

    def poll(self) -> GroupState:
        """The current state."""

    def claim(self, number: int, entry: Entry) -> Entry:
        """Make `entry` the entry `number` of the chain, counted from 1, if no entry has that number
        yet. The caller must know all entries before it. Returns the entry with that number.
        """

    def new_attempt(self, attempt: int) -> None:
        """Give the workers of this host the keys of this attempt, which is empty at first."""

    def close(self, *, leave: bool) -> None:
        """Leave the group. With `leave`, the others learn of it at once; otherwise when the lease
        is over.
        """


class Chain:
    """The entries that this host has received, and the plan that follows from them. One thread
    appends; others may read: the entries only grow, and a plan is never changed.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.plan = JobPlan()

    def append(self, data: bytes) -> None:
        entry = decode(data)
        self.plan = self.plan.apply(entry)
        self.entries.append(entry)


@dataclasses.dataclass(frozen=True)
class Objection:
    """Why a host is not admitted: for good, or for at most `limit_s` seconds if that is not 0."""

    reason: str
    limit_s: float = 0.0


def objection(
    candidate: HostInfo, leader: HostInfo, hosts: Iterable[HostInfo], lost_after_s: float
) -> Objection | None:
    """Why `candidate` is not admitted now; `None` if it is. `lost_after_s`: after this time without
    a sign of life, a host of the group is lost.
    """
    names = [*leader.settings, *(n for n in candidate.settings if n not in leader.settings)]
    for name in names:
        ours, theirs = leader.settings.get(name), candidate.settings.get(name)
        if ours != theirs:
            return Objection(
                f"{name} differs between the hosts of this run: {leader.name} has {_text(ours)}, "
                f"{candidate.name} has {_text(theirs)}"
            )
    if is_loopback(candidate.address) and not is_loopback(leader.address):
        return Objection(
            f"the address of {candidate.name} is {candidate.address}, a loopback address, which "
            "other hosts cannot reach: give --local-addr"
        )
    for host in hosts:
        if host.address == candidate.address and host.id != candidate.id:
            return Objection(
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

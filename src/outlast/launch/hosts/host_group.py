"""The host group as an agent sees it: who has joined, who is lost, and the store that all share.

Two implementations: over the agents' own consensus (`--rdzv-backend c10d`) and over etcd.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.stores.store import Store
from outlast.launch.config.secret import Secret
from outlast.system.lease_page import LeasePage


class PrefixedStore(Store, Protocol):
    """A store whose keys can be found, and deleted, by how they begin."""

    def keys(self, prefix: str) -> list[str]:
        """The keys that start with `prefix`, sorted."""

    def delete_prefix(self, prefix: str) -> None:
        """Removes the keys that start with `prefix`, in one operation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What an agent needs to find its group.

    Attributes:
        run_id: the group's name; hosts with another run id are never members of it.
        endpoints: host and port of each, in the order of the command line.
        page: the lease page that the group renews.
        local_addr: the address of this host for the others; `None` finds it from the routes.
        lease_s: how long a host may be silent before the others go on without it.
        join_limit_s: how long `HostGroup.start` tries.
        settings: what must be equal on all hosts, in the order in which it is compared: name (as
            the user knows it, `--nproc-per-node` for example) and value. A refusal names the first
            that differs.
        place: the place that this host asks for (`--node-rank`); -1 for any.
        conf: further settings of the backend (`--rdzv-conf`).
        say: prints a line for the user.
        secret: of the job, for the connections between hosts; `None` if it has none.
    """

    run_id: str
    endpoints: tuple[tuple[str, int], ...]
    page: LeasePage
    local_addr: str | None = None
    lease_s: float = 5.0
    join_limit_s: float = 600.0
    settings: tuple[tuple[str, str], ...] = ()
    place: int = -1
    conf: Mapping[str, str] = dataclasses.field(default_factory=dict)
    say: Callable[[str], None] = lambda line: None
    secret: Secret | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LostHost:
    """A host that is no longer in the group. `left` is true if it has left in an orderly way."""

    host: HostInfo
    reason: str
    left: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupState:
    """What this host knows of the group.

    Attributes:
        hosts: those that have joined and are not lost, in the order in which they joined.
        lost: all others that ever joined, in the order in which they were lost.
        leader: id of the host that decides for the group; empty if this host knows of none. Two
            hosts may see different leaders for a moment: a decision is a claim in the store.
        term: of the leader.
        error: why this host must not act any more; empty while it may.
        refused: lines about hosts that this host did not admit, with the setting that is wrong.
    """

    hosts: tuple[HostInfo, ...] = ()
    lost: tuple[LostHost, ...] = ()
    leader: str = ""
    term: int = 0
    error: str = ""
    refused: tuple[str, ...] = ()


class HostGroup(Protocol):
    """The membership of one agent in the group of its job."""

    @property
    def me(self) -> HostInfo:
        """This host; known after `start`."""

    @property
    def store(self) -> PrefixedStore:
        """The agents' keys. Raises `StoreError` naming the cause once the lease is over."""

    def start(self) -> None:
        """Join the group, or found it.

        Raises:
            LaunchError: naming the endpoint and the reason, after at most `join_limit_s`.
        """

    def wakeup_fd(self) -> int:
        """A descriptor that is readable when the state has changed; `poll` makes it unreadable."""

    def poll(self) -> GroupState:
        """The current state."""

    def new_attempt(self, attempt: int) -> None:
        """Give the workers of this host the keys of this attempt, which is empty at first."""

    def close(self, *, leave: bool) -> None:
        """Leave the group. With `leave`, the others learn of it at once; otherwise when the lease
        is over.
        """

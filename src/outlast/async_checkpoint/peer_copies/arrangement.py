"""How the ranks of a checkpointer arrange their copies: who holds whose, the token, the keepers.

The failure domains form a ring, in the order of their lowest ranks, and each domain's copies are in
the next one. So a domain holds the copies of one other domain only, and what it sends and receives
does not grow with the number of hosts. Copies and originals are both lost only with two neighbors
of the ring.
"""

from __future__ import annotations

import dataclasses
import hmac
import math
import secrets
from collections.abc import Sequence

from outlast.async_checkpoint.environment import (
    copies_key,
    failure_domain,
    host_name,
    own_address,
    runtime_folder,
)
from outlast.async_checkpoint.peer_copies.client import KeeperClient
from outlast.async_checkpoint.peer_copies.messages import Arrange
from outlast.async_checkpoint.storage.manifest import checksum
from outlast.coordination.call_ledger import CallLedger
from outlast.errors import CheckpointError
from outlast.system.arguments import as_int


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank runs: its host, and the failure domain (a rack, say) that the host is in."""

    host: str
    domain: str


def holders(places: Sequence[Place]) -> list[int] | None:
    """The rank that holds the copies of each rank; `None` if all ranks are in one failure domain.

    Raises:
        ValueError: if a host is in two failure domains.
    """
    domain_of: dict[str, tuple[str, int]] = {}
    ranks_in: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        known, first = domain_of.setdefault(place.host, (place.domain, rank))
        if known != place.domain:
            raise ValueError(
                f"ranks {first} and {rank} are both on host {place.host}, but OUTLAST_FAILURE_"
                f"DOMAIN is {known!r} for one and {place.domain!r} for the other: set it to one "
                "value on each host"
            )
        ranks_in.setdefault(place.domain, []).append(rank)
    if len(ranks_in) < 2:
        return None
    found = [-1] * len(places)
    ring = list(ranks_in.values())
    for ranks, following in zip(ring, [*ring[1:], ring[0]], strict=True):
        for number, rank in enumerate(ranks):
            found[rank] = following[number % len(following)]
    return found


DEFAULT_BYTES_PER_S = 250e6
"""For each rank: eight of them use a sixth of a 100 Gbit/s network."""


def check_replicas(replicas: int, bandwidth: float) -> tuple[int, float]:
    """Checks these options of a checkpointer."""
    replicas = as_int("replicas", replicas, at_least=0)
    if replicas > 1:
        raise ValueError(f"replicas must be 0 or 1, not {replicas}: one copy is kept")
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, int | float):
        raise TypeError(f"replica_bandwidth must be a number, not {bandwidth!r}")
    if not 0 < bandwidth < math.inf:
        raise ValueError(f"replica_bandwidth must be positive bytes per second, not {bandwidth!r}")
    return replicas, float(bandwidth)


def new_keeper(url: str, linger_s: float, launcher: int, main: int) -> KeeperClient:
    """The keeper of this process for a folder of checkpoints; not started yet."""
    group = checksum(f"{url}\0{host_name()}".encode())
    folder = runtime_folder()
    return KeeperClient(
        {
            "linger_s": linger_s,
            "launcher": launcher,
            "socket": str(folder / f"copies-{group}-{main}.sock"),
            "sockets": str(folder / f"copies-{group}-*.writer"),
        }
    )


def own_place() -> Place:
    """Where this rank runs."""
    host = host_name()
    return Place(host, failure_domain() or host)


@dataclasses.dataclass
class Arrangement:
    """What this rank knows about the copies of one checkpointer.

    Attributes:
        hosts: of all ranks.
        address: of this rank's keeper, as other hosts reach it.
        token: known to the ranks of this checkpointer only.
    """

    hosts: list[str]
    address: str
    token: str
    keeper: KeeperClient

    @classmethod
    def begin(
        cls, keeper: KeeperClient, ledger: CallLedger, hosts: list[str], bytes_per_s: float
    ) -> Arrangement:
        """Agrees on the token, and starts the keeper; does not wait for it.

        Raises:
            CheckpointError: if this host's address is unknown.
        """
        # Whoever can read the job's store sees what was agreed. In a job with a secret that is not
        # enough: the token depends on a key as well, which only the workers of the job have.
        token = ledger.agree("token", secrets.token_hex(32))
        if key := copies_key():
            token = hmac.digest(key, token.encode(), "sha256").hex()
        try:
            address = own_address()
        except OSError as e:
            raise CheckpointError(
                f"replicas=1: the address of host {host_name()} for other hosts is unknown ({e}): "
                "set OUTLAST_HOST_ADDR to it"
            ) from e
        keeper.arrange(Arrange(address=address, token=token, bytes_per_s=bytes_per_s))
        return cls(hosts, address, token, keeper)

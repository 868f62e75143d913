"""How the ranks of a checkpointer arrange their copies: the hosts, the token, the keepers."""

from __future__ import annotations

import dataclasses
import hmac
import math
import secrets

from outlast.async_checkpoint.environment import (
    copies_key,
    failure_domain,
    host_name,
    own_address,
    runtime_folder,
)
from outlast.async_checkpoint.peer_copies.client import KeeperClient
from outlast.async_checkpoint.peer_copies.messages import Arrange
from outlast.async_checkpoint.peer_copies.placement import Place
from outlast.async_checkpoint.storage.manifest import checksum
from outlast.coordination.call_ledger import CallLedger
from outlast.errors import CheckpointError
from outlast.system.arguments import as_int

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

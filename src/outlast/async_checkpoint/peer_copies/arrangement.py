"""How the ranks of a checkpointer arrange their copies: who holds whose, the token, the keeper.

The failure domains form a ring, in the order of their lowest ranks, and each domain's copies are in
the next one. So a domain holds the copies of one other domain only, and what it sends and receives
does not grow with the number of hosts. Copies and originals are both lost only with two neighbors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from outlast.async_checkpoint.environment import (
    copies_key,
    failure_domain,
    host_name,
    own_address,
    runtime_folder,
)
from outlast.async_checkpoint.peer_copies.keeper import Keeper
from outlast.async_checkpoint.storage.manifest import checksum
from outlast.async_checkpoint.writer.client import Pending, ProcessClient, ProcessFailed
from outlast.async_checkpoint.writer.remote import Call
from outlast.coordination.call_ledger import CallLedger
from outlast.errors import CheckpointError
from outlast.system.arguments import as_int
from outlast.system.error_text import describe
from outlast.system.parallel import start_thread


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank runs: its host, and the failure domain (a rack, say) that the host is in."""

    host: str
    domain: str

    @classmethod
    def here(cls) -> Place:
        host = host_name()
        return cls(host, failure_domain() or host)


def holders(places: Sequence[Place]) -> list[int] | None:
    """The rank that holds the copies of each rank; `None` if there is only one failure domain."""
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


def token_of(agreed: str) -> str:
    """Every process that can read the job's store sees what was agreed. In a job with a secret the
    token depends on a key as well, which only the workers of the job have.
    """
    key = copies_key()
    return hmac.digest(key, agreed.encode(), "sha256").hex() if key else agreed


class KeeperClient(ProcessClient):
    """The main process's side of its keeper. The replacement of a lost one is arranged as that was.

    An interrupt in the middle of a message would end the connection, and with it the copies that
    the keeper holds. So threads of their own send, and callers only wait. `kept`: the save whose
    copies are complete on all ranks; empty if there is none.
    """

    name = "keeper process"

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.timeout_s = 20.0  # but for what waits for another host
        self.kept = ""
        self._arrangement: dict[str, Any] | None = None
        self._arranged: Pending[int] | None = None

    @classmethod
    def of_folder(cls, url: str, linger_s: float) -> KeeperClient:
        """The keeper of this process for a folder of checkpoints; not started yet."""
        group = checksum(f"{url}\0{host_name()}".encode())
        folder = runtime_folder()
        return cls(
            {
                "linger_s": linger_s,
                "launcher": os.getppid(),
                "socket": str(folder / f"copies-{group}-{os.getpid()}.sock"),
                "sockets": str(folder / f"copies-{group}-*.writer"),
            }
        )

    def arrange(self, address: str, token: str, bytes_per_s: float) -> None:
        """Begins a new arrangement (`Keeper.arrange`); does not wait for it."""
        self._arrangement = {"address": address, "token": token, "bytes_per_s": bytes_per_s}
        self._arranged = self.begin(Keeper.arrange, **self._arrangement)

    def port(self) -> int:
        assert self._arrangement is not None
        assert self._arranged is not None
        if self._process is None and self._arranged.done():
            self._arranged = self.begin(Keeper.arrange, **self._arrangement)
        return self._arranged.result(self.timeout_s)

    def keep_only(self, save_id: str) -> None:
        """Releases all copies but those of this save; without one, all."""
        self.kept = save_id
        with contextlib.suppress(CheckpointError):  # a keeper that is lost holds nothing
            self.request(Keeper.keep_only, save_id=save_id)

    def close(self, timeout_s: float) -> None:
        """Ends the keeper, after `timeout_s` with a kill. Its copies are lost."""
        with self._sending:
            self.tell(Keeper.goodbye)
            self._closed = True
        self.end(timeout_s)

    def _program(self) -> str:
        return "outlast.async_checkpoint.peer_copies.keeper"

    def _send_request(self, pending: Pending[Any], arguments: dict[str, Any]) -> None:
        def send() -> None:
            try:
                super(KeeperClient, self)._send_request(pending, arguments)
            except Exception as e:  # noqa: BLE001 - a caller waits for the request
                cause = f"the keeper of copies cannot be reached: {describe(e)}"
                pending.set_exception(ProcessFailed(cause))

        start_thread("outlast-keeper-request", send)

    def _replayed(self, method: str) -> Iterator[tuple[Call, Pending[Any] | None]]:
        if self._arrangement is not None and method != "arrange":
            self._arranged = Pending(self, "arrange")
            yield Call("arrange", self._arrangement), self._arranged


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
        """Agrees on the token, and starts the keeper; does not wait for it."""
        token = token_of(ledger.agree("token", secrets.token_hex(32)))
        try:
            address = own_address()
        except OSError as e:
            raise CheckpointError(
                f"replicas=1: the address of host {host_name()} for other hosts is unknown ({e}): "
                "set OUTLAST_HOST_ADDR to it"
            ) from e
        keeper.arrange(address, token, bytes_per_s)
        return cls(hosts, address, token, keeper)

"""What a host says about itself, and the entries of the chain that say which hosts there are."""

from __future__ import annotations

import ipaddress

import msgspec


class HostInfo(msgspec.Struct, frozen=True):
    """One agent process. A restarted agent is a new host with a new `id`.

    Attributes:
        id: unique for all time, e.g. `node3-1f6c9a`.
        name: the host name, for messages.
        address: how other hosts reach this one.
        port: where its agent listens for other agents.
        store_port: where its agent serves the store to workers.
        place: the place among the hosts that it asks for; -1 for any.
        topology: where it is in the network, from the outermost level inward; ranks follow it.
        settings: what must be equal on all hosts (versions, script, arguments, options), by name.
    """

    id: str
    name: str = ""
    address: str = ""
    port: int = 0
    store_port: int = 0
    place: int = -1
    topology: tuple[str, ...] = ()
    settings: dict[str, str] = {}

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    def __post_init__(self) -> None:
        if self.address:
            ipaddress.ip_address(self.address.partition("%")[0])
        for port in (self.port, self.store_port):
            if not 0 <= port < 1 << 16:
                raise ValueError(f"no port: {port}")


class ChainEntry(msgspec.Struct, frozen=True, tag_field="do"):
    """An entry of the chain (see `table`): what has happened, in one order for all hosts."""

    def encode(self) -> bytes:
        """As it is in the store."""
        return msgspec.json.encode(self)


class HostJoined(ChainEntry, frozen=True, tag="host joined"):
    """A host is admitted to the group."""

    info: HostInfo


class HostLost(ChainEntry, frozen=True, tag="host lost"):
    """A host was declared lost, or has `left` in order. The store performs nothing for it more."""

    host: str
    reason: str
    left: bool = False

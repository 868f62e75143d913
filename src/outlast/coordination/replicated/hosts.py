"""What a host says about itself when it joins."""

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
        nproc: the number of workers per host.
        standby: the number of standby processes.
        place: the place among the hosts that it asks for; -1 for any.
        settings: what must be equal on all hosts (versions, script, arguments, options), by name.
    """

    id: str
    name: str = ""
    address: str = ""
    port: int = 0
    store_port: int = 0
    nproc: int = 1
    standby: int = 0
    place: int = -1
    settings: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.address:
            ipaddress.ip_address(self.address.partition("%")[0])
        for port in (self.port, self.store_port):
            if not 0 <= port < 1 << 16:
                raise ValueError(f"no port: {port}")

    def encode(self) -> str:
        """As one line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, line: str | bytes) -> HostInfo:
        """The reverse of `encode`; ignores what it does not know."""
        return msgspec.json.decode(line, type=cls)

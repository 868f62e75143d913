"""What a host says about itself when it joins."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class HostInfo:
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
    settings: dict[str, str] = field(default_factory=dict)

    def encode(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, line: str | bytes) -> HostInfo:
        """The reverse of `encode`; ignores what it does not know."""
        said: dict[str, Any] = json.loads(line)
        return cls(**{name: said[name] for name in cls.__dataclass_fields__ if name in said})

"""Environment variables: the only module of this package that reads `os.environ`."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from outlast.async_checkpoint.storage.protocol import Position
from outlast.system.sockets import address_towards


def events_folder() -> str:
    """The folder for events; an empty string for none."""
    return os.environ.get("OUTLAST_EVENTS_DIR", "")


def local_ranks() -> int:
    """The number of ranks on this host, as set by the launcher; 1 by default."""
    return _count("LOCAL_WORLD_SIZE")


def ranks() -> int:
    """The number of ranks, as set by the launcher; 1 by default."""
    return _count("WORLD_SIZE")


def may_have_other_hosts() -> bool:
    """Whether ranks may be on other hosts, or in other failure domains, than this one."""
    return local_ranks() < ranks() or bool(failure_domain())


def _count(name: str) -> int:
    value = os.environ.get(name, "1")
    return max(1, int(value)) if value.isdigit() else 1


def host_name() -> str:
    """The name of this host: as set by the launcher, or the system's."""
    return os.environ.get("OUTLAST_HOST") or socket.gethostname()


def failure_domain() -> str:
    """The failure domain of this host, as set by the user; empty if it is a domain of its own."""
    return os.environ.get("OUTLAST_FAILURE_DOMAIN", "")


def own_address() -> str:
    """The address of this host for others: from the launcher, or that towards `MASTER_ADDR`."""
    given = os.environ.get("OUTLAST_HOST_ADDR", "")
    if given:
        return given
    master, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return address_towards((master, int(port) if port.isdigit() else 1) if master else None)


def copies_key() -> bytes:
    """What the launchers have derived from the secret for copies, if any, or a `ValueError`."""
    text = os.environ.get("OUTLAST_COPIES_KEY", "")
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ValueError("OUTLAST_COPIES_KEY is not hexadecimal digits") from None


def position() -> Position | None:
    """This process's position in a job on many hosts; `None` in any other job."""
    lease, run = os.environ.get("OUTLAST_FENCE", ""), os.environ.get("OUTLAST_RUN", "")
    if not lease or not run:
        return None
    text = os.environ.get("OUTLAST_ITERATION", "")
    if text:  # in a wrapped function: attempt, call, iteration
        order = tuple(int(part) for part in text.split("."))
    else:
        order = (int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),)
    return Position(run, order, lease)


def runtime_folder() -> Path:
    """A folder for this user's sockets, which may not exist yet."""
    return Path(tempfile.gettempdir()) / f"outlast-{os.getuid()}"

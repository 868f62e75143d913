"""The environment variables of this package: its only module that uses `os.environ`.

A variable that is not a number, or out of range, is a `ValueError` that names it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "OUTLAST_ITERATION",
)


@dataclass(frozen=True)
class Launch:
    """The values that the launcher has set."""

    rank: int  # at the start of the job; 0 without a launcher
    world_size: int  # at the start of the job; 1 without a launcher
    host: str | None  # of the store
    port: int | None
    agent_store: bool  # whether the launcher hosts the store there (torchrun, `outlast run`)
    attempt: int  # how many times the launcher restarted all workers, with the same store
    replacement: int  # how many times this rank was replaced
    events_dir: str  # where to write events, or an empty string
    agent: bool = False  # whether the launcher is `outlast run`
    local_world_size: int = 1  # ranks on this host, as the launcher started them
    host_id: str = ""  # of this host among those of the job; empty for a job on one host
    read_lease: str = ""  # the page with the read lease of this host, if the launcher has one
    host_address: str = ""  # at which other hosts reach this one; empty: found from the store's
    # the ID of the host of the ranks that this process and its neighbors succeed, and why they
    # leave; of this host, if it succeeds its own rank alone
    succeeds: tuple[str, str] | None = None


def read_launch() -> Launch:
    """Reads the launcher's variables."""
    rank, world_size = environment_rank()
    host, port = _agent_store() or (os.environ.get("MASTER_ADDR"), master()[1])
    if world_size > 1 and not port:
        raise ValueError(
            f"MASTER_PORT is not set, but WORLD_SIZE={world_size}: the store cannot be found"
        )
    return Launch(
        rank=rank,
        world_size=world_size,
        host=host,
        port=port or None,
        agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        attempt=_number("TORCHELASTIC_RESTART_COUNT", 0),
        replacement=_number("OUTLAST_REPLACEMENT", 0),
        events_dir=os.environ.get("OUTLAST_EVENTS_DIR", ""),
        agent=os.environ.get("OUTLAST_AGENT", "") == "1",
        local_world_size=_number("LOCAL_WORLD_SIZE", 1),
        host_id=os.environ.get("OUTLAST_HOST", ""),
        read_lease=os.environ.get("OUTLAST_READ_LEASE", ""),
        host_address=os.environ.get("OUTLAST_HOST_ADDR", ""),
        succeeds=_succeeded(),
    )


def _succeeded() -> tuple[str, str] | None:
    text = os.environ.get("OUTLAST_SUCCEEDS")
    if text is None:
        return None
    host, _, reason = text.partition(" ")
    return host, reason


def launched_job() -> str:
    """The name that `outlast run` gives the job on this host; empty under any other launcher."""
    return os.environ.get("OUTLAST_JOB", "") if os.environ.get("OUTLAST_AGENT") == "1" else ""


def environment_rank() -> tuple[int, int]:
    """`RANK` and `WORLD_SIZE`; 0 and 1 without a launcher. `WORLD_SIZE` is the size at the start of
    the job: a host that joined later has ranks beyond it.
    """
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    joins = _number("OUTLAST_REPLACEMENT", 0) > 0
    if not 0 <= rank < world_size and not (joins and rank >= world_size):
        raise ValueError(f"RANK={rank} must be at least 0 and below WORLD_SIZE={world_size}")
    return rank, world_size


def store_endpoint() -> tuple[str, int] | None:
    """Where `init_process_group` finds the store of the iteration; `None` before the first one: the
    environment then names the store of the job, to which the call itself is connected.
    """
    address, port = master()
    return (address, port) if port and "OUTLAST_ITERATION" in os.environ else None


def master() -> tuple[str, int]:
    """`MASTER_ADDR` and `MASTER_PORT`; an empty string and 0 if they are not set."""
    port = _number("MASTER_PORT", 0)
    if not 0 <= port < 1 << 16:
        raise ValueError(f"MASTER_PORT={port} is not a port: at most 65535")
    return os.environ.get("MASTER_ADDR", ""), port


def _agent_store() -> tuple[str, int] | None:
    """The server through which the processes of this host use the job's store. On several hosts,
    each launcher runs one, so that no process depends on another host's.
    """
    text = os.environ.get("OUTLAST_STORE", "")
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"OUTLAST_STORE={text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def is_host_server(endpoint: tuple[str, int] | None) -> bool:
    """Whether a launcher on one of several hosts serves the store there, for this host."""
    return endpoint is not None and endpoint == _agent_store()


def nccl_environment() -> dict[str, str]:
    """The variables of NCCL, and those of torch for it."""
    return {name: value for name, value in os.environ.items() if "NCCL_" in name}


def is_first_on_host() -> bool:
    """Whether what all ranks of a host would log is logged here; not by a replacement once more."""
    return _number("LOCAL_RANK", 0) == 0 and _number("OUTLAST_REPLACEMENT", 0) == 0


def _nccl_variables() -> dict[str, str]:
    """Keeps torch's NCCL watchdog from ending a process that restarts in place.

    torch reads them whenever it creates an NCCL group. By default the watchdog ends the process
    when a collective fails, which may happen whenever a peer dies: not at once, but after a sleep
    of four times the time for a dump, 60 s, when the process has long restarted. Until then, the
    destruction of the group waits for the watchdog. The abort of the groups and the timeouts of the
    `Wrapper` take its place.

    A value of the user is kept, except for `TORCH_NCCL_ASYNC_ERROR_HANDLING=1`: launchers set it.
    """
    values: dict[str, str] = {}
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":
        values["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if "TORCH_NCCL_RETHROW_CUDA_ERRORS" not in os.environ:
        values["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"
    dumps = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    if not any(name in os.environ for name in dumps):
        values.update(zip(dumps, ("0", "1"), strict=True))
    return values


@contextmanager
def exported() -> Iterator[None]:
    """Sets the variables of the NCCL watchdog; restores them and those of `publish_rank`."""
    nccl = _nccl_variables()
    before = {name: os.environ.get(name) for name in (*_RANK_VARIABLES, *nccl)}
    try:
        os.environ.update(nccl)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def publish_rank(
    rank: int, world_size: int, position: tuple[int, int, int], endpoint: tuple[str, int]
) -> None:
    """Sets the rank for the function, its position in the job (attempt, call, iteration), and the
    iteration's store for `init_process_group`.

    torch is told that the store is already hosted, as under torchrun, so it starts no server.
    """
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR=endpoint[0],
        MASTER_PORT=str(endpoint[1]),
        TORCHELASTIC_USE_AGENT_STORE=str(True),
        TORCHELASTIC_RESTART_COUNT=str(position[2]),
        OUTLAST_ITERATION=".".join(map(str, position)),
    )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None

"""The environment variables of workers; the only module of the launcher that reads `os.environ`.

The names are torchrun's, so that a script sees no difference; the `OUTLAST_*` variables are added.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a standby process uses this module, and imports no more than it needs
    from outlast.launch.config.job_spec import JobSpec, Placement
    from outlast.launch.config.slurm import SlurmStep

_MARK = "OUTLAST_JOB"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_CHAOS_STATE = "OUTLAST_CHAOS_STATE"
_ETCD_PASSWORD = "OUTLAST_ETCD_PASSWORD"  # of the launcher alone
_TOKEN = "OUTLAST_TOKEN"  # of the launcher alone
_COPIES_KEY = "OUTLAST_COPIES_KEY"

PER_WORKER = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "OUTLAST_REPLACEMENT",
    "OUTLAST_STORE", "OUTLAST_HOST", "OUTLAST_HOST_ADDR", "OUTLAST_FENCE", _GLOO_INTERFACE,
    "OUTLAST_ITERATION", "OUTLAST_MASTER_ADDR", "OUTLAST_READ_LEASE", "OUTLAST_SUCCEEDS",
})  # fmt: skip
"""The variables that are known only when a worker gets its place in the job."""

_OWN_PREFIX = ("fsspec.config", "tqdm.utils")
"""Modules that look through all variables, at their import, for those with a prefix of their own.
torch and the frameworks import them."""

_RANK_ZERO = {
    "lightning.fabric.utilities.rank_zero": "RANK",
    "lightning_fabric.utilities.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}
"""Modules that read the rank at their import, only for `rank_zero_only.rank`, and the variable that
it has: a standby process imports them, and sets it when it gets its place.
"""


def python() -> str:
    """The workers' interpreter: `PYTHON_EXEC`, as with torchrun, or the launcher's interpreter."""
    return os.environ.get("PYTHON_EXEC") or sys.executable


def names_events() -> bool:
    """Whether the user has set the folder of events, for all processes."""
    return bool(os.environ.get("OUTLAST_EVENTS_DIR"))


def chaos_state() -> Path | None:
    """The folder of fired faults, if the user has set one, as for a job on several hosts."""
    return Path(given) if (given := os.environ.get(_CHAOS_STATE)) else None


def etcd_password() -> str:
    """The password of the user of etcd: never an argument, which other users could read."""
    return os.environ.get(_ETCD_PASSWORD, "")


def take_token() -> str:
    """The secret of the job. It is removed, so that no process that this one starts has it."""
    return os.environ.pop(_TOKEN, "")


def mark(job: JobSpec) -> str:
    """The variable in the environment of every process of the job, and of no other process."""
    return f"{_MARK}={job.mark}"


def step() -> SlurmStep | None:
    """The Slurm step in which the launcher runs, if it has several nodes."""
    from outlast.launch.config.slurm import slurm_step

    return slurm_step(os.environ)


def topology() -> tuple[str, str]:
    """Where the user, or else Slurm, says that this host is in the network; and the number that
    Slurm or Kubernetes has given to this launcher. Empty if they say nothing.
    """
    from outlast.launch.config.slurm import switches

    number = os.environ.get("SLURM_PROCID") or os.environ.get("JOB_COMPLETION_INDEX", "")
    return os.environ.get("OUTLAST_TOPOLOGY") or ".".join(switches(os.environ)), number


def gloo_interface(address: str) -> dict[str, str]:
    """The variable with which gloo uses the interface of `address`, unless it does so anyway,
    because the host name resolves to that address, or the user has chosen one.
    """
    if os.environ.get(_GLOO_INTERFACE):
        return {}
    with contextlib.suppress(OSError):
        own = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        if own and own[0][4][0] == address:
            return {}
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        # All addresses of 127.0.0.0/8 belong to the loopback interface, which lists only one.
        loopback = any(a.address == "127.0.0.1" for a in addresses)
        if any(a.address.partition("%")[0] == address for a in addresses) or (
            loopback and address.startswith("127.")
        ):
            return {_GLOO_INTERFACE: name}
    return {}


def launcher_environment(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a launcher that this process starts."""
    return {**os.environ, **added}


def orphan_killer_environment() -> dict[str, str]:
    """The launcher's environment, without the mark of a job that the launcher itself may be in."""
    return {name: value for name, value in os.environ.items() if name != _MARK}


def checks_environment() -> dict[str, str]:
    """The launcher's environment, without what only it may know."""
    return {name: value for name, value in os.environ.items() if name != _ETCD_PASSWORD}


def worker_environment(
    job: JobSpec, placement: Placement, *, local_rank: int, replacement: int, error_file: Path
) -> dict[str, str]:
    """The complete environment of one worker; `replacement` is the number of replacements of its
    rank in this attempt, and torch's `@record` writes an exception to `error_file`.
    """
    rank = str(placement.ranks(job.nproc)[local_rank])
    world_size = str(placement.places * job.nproc)
    values = {
        **placement.variables,
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world_size,
        "GROUP_RANK": str(placement.place),
        "GROUP_WORLD_SIZE": str(placement.places),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": placement.store[0],
        "MASTER_PORT": str(placement.store[1]),
        "TORCHELASTIC_RESTART_COUNT": str(placement.attempt),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "OUTLAST_REPLACEMENT": str(replacement),
    }
    return standby_environment(job) | values


def standby_environment(job: JobSpec) -> dict[str, str]:
    """The environment of a standby process: a worker's, without the variables of `PER_WORKER`."""
    # The user's choice of an interface is kept.
    dropped = (PER_WORKER | {_ETCD_PASSWORD, _COPIES_KEY}) - {_GLOO_INTERFACE}
    given = {name: value for name, value in os.environ.items() if name not in dropped}
    values = {
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "ROLE_NAME": job.role,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts or 0),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": given.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OUTLAST_AGENT": "1",
        _MARK: job.mark,
    }
    if job.token:
        values["OUTLAST_RUN"] = job.token
        if job.secret is not None:
            # Copies travel between processes of workers, which do not get the secret itself: with
            # this key, nobody can join the group of hosts. The run makes it another one each time.
            key = job.secret.derive("copies of checkpoints", job.token.encode())
            values[_COPIES_KEY] = key.hex()
    if job.nproc > 1:
        values["OMP_NUM_THREADS"] = given.get("OMP_NUM_THREADS", "1")
    if job.events_dir is not None:
        values["OUTLAST_EVENTS_DIR"] = str(job.events_dir)
    if job.chaos is not None:
        values["OUTLAST_CHAOS"] = str(job.chaos)
    if job.chaos_state is not None:
        values[_CHAOS_STATE] = str(job.chaos_state)
    return given | values


def set_variables(values: Mapping[str, str], *, keep: bool = False) -> None:
    """Set variables of this process; with `keep`, only those that are not set."""
    for name, value in values.items():
        if not keep or name not in os.environ:
            os.environ[name] = value


def tell_frameworks_the_rank() -> None:
    """Set what the frameworks that are imported have read too early: see `_RANK_ZERO`."""
    for name, variable in _RANK_ZERO.items():
        if name in sys.modules:
            sys.modules[name].rank_zero_only.rank = int(os.environ[variable])


@contextlib.contextmanager
def recorded_reads() -> Iterator[list[str]]:
    """Record which of the variables `PER_WORKER` are read within the block, other than by modules
    that can be told later (`tell_frameworks_the_rank`).
    """
    reads: list[str] = []
    plain = type(os.environ)
    os.environ.__class__ = _recording(plain, reads.append)
    try:
        yield reads
    finally:
        os.environ.__class__ = plain


def _recording(plain: Any, record: Callable[[str], None]) -> type:
    """A subclass of the type of `os.environ`; all of its methods read by the two of this one."""

    def getitem(self: Any, key: str) -> str:
        try:
            return str(plain.__getitem__(self, key))  # the user's choice, which a worker has, too
        except KeyError:
            if key in PER_WORKER and _reader() not in _RANK_ZERO:
                record(key)
            raise

    def iterate(self: Any) -> Iterator[str]:
        if _reader() not in _OWN_PREFIX:
            record("all environment variables")
        return iter(plain.__iter__(self))

    return type(plain.__name__, (plain,), {"__getitem__": getitem, "__iter__": iterate})


def _reader() -> str:
    """The name of the module that reads the environment."""
    frame: FrameType | None = sys._getframe(2)
    name = ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in ("os", "collections.abc", "_collections_abc"):
            break
        frame = frame.f_back
    return name

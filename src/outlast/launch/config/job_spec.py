"""A job, as the launcher of one host sees it: what to run, where, where its output goes, and what
is checked before.

The processes that check a host import this module: it has no options, and nothing that is slow.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import math
import shlex
import uuid
from collections.abc import Mapping
from pathlib import Path

from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.config.secret import Secret

DEFAULT_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that every worker runs. `wrapped`: it has a function with `Wrapper`; a module, or
    a script that imports that function, does not say so.
    """

    name: str
    args: tuple[str, ...] = ()
    module: bool = False
    python: bool = True
    wrapped: bool = False

    def as_typed(self) -> str:
        return shlex.join([*(["-m"] if self.module else []), self.name, *self.args])

    def command(self, interpreter: str, chaos: bool) -> list[str]:
        """The command line of a worker. Output is unbuffered, as with torchrun."""
        if not self.python:
            return [self.name, *self.args]
        # Faults are injected into the workers only, never into the launcher.
        bootstrap = ["-m", "outlast.chaos.bootstrap"] if chaos else []
        module = ["-m"] if self.module else []
        return [interpreter, "-u", *bootstrap, *module, self.name, *self.args]


def has_wrapper(source: str) -> bool:
    """Whether the script itself uses a `Wrapper` of outlast. Where `enabled` may be false, it does
    not count.
    """
    if "outlast" not in source:
        return False
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return False  # the script ends with that error
    ours = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "outlast"
    }
    may_be_off = {
        ast.unparse(node.func)
        for node in nodes
        if isinstance(node, ast.Call) and any(each.arg == "enabled" for each in node.keywords)
    }
    names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)}
    return any(
        name.split(".")[-1] == "Wrapper" and name.split(".")[0] in ours
        for name in names - may_be_off
    )


class Std(enum.IntFlag):
    """Standard streams of a process."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclasses.dataclass(frozen=True)
class Routes:
    """The destinations of each local rank's output."""

    redirects: dict[int, Std]  # streams that go to files only
    # streams that go to files and to the console; takes precedence over `redirects`
    tee: dict[int, Std]
    shown: frozenset[int]  # the local ranks that the console shows

    @property
    def any_file(self) -> bool:
        return any([*self.redirects.values(), *self.tee.values()])

    def to_file(self, local_rank: int, stream: Std) -> bool:
        return bool((self.redirects[local_rank] | self.tee[local_rank]) & stream)

    def to_console(self, local_rank: int, stream: Std) -> bool:
        hidden = self.redirects[local_rank] & ~self.tee[local_rank]
        return local_rank in self.shown and not hidden & stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthSpec:
    """What is checked before this host takes part in the job."""

    level: str  # off, quick or full; with off, the command alone is run
    folder: str  # a file is written in it, and read
    free_bytes: int  # how much must be free there and in shared memory
    command: str  # of the user, for a shell; empty for none
    limit_s: float  # how long each check may take
    interval_s: float | None = None  # between two runs of the command while the job runs

    @property
    def checks_neighbors(self) -> bool:
        """Whether the network is checked too, in a job on several hosts."""
        return self.level == "full"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbor:
    """The other host of a pair, and how this one meets it."""

    name: str
    key: str  # of the pair in the store: a host has one port for all of its checks
    side: int  # 0 for the host that serves the store, at `address` and `port`; 1 for the other one
    address: str
    port: int
    fd: int  # the listening socket, on side 0
    devices: bool  # whether the accelerators take part
    limit_s: float  # how long it may take
    # of the device of this rank, and how many ranks each host has; empty to find out
    kind: str = ""
    rank: int = 0  # of this process among those of its host


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job."""

    program: Program
    nproc: int  # number of workers on each host
    routes: Routes
    run_id: str
    # `None` if not given; the default depends on the script, see `decisions`
    max_restarts: int | None = None
    # the restarts of the last seconds count; if infinite: those since the last progress, or in a
    # job that does not use `Wrapper`, all
    restart_window_s: float = math.inf
    role: str = "default"
    master_addr: str = DEFAULT_HOST
    master_port: int = 0
    log_dir: Path | None = None
    events_dir: Path | None = None
    chaos: Path | None = None
    chaos_state: Path | None = None  # the folder in which the workers keep which faults have fired
    grace_s: float = 30.0
    leaves_on_signal: bool = True  # one of several hosts, rather than that the job stops
    leave_exit_code: int = 0  # of the launcher of a host that has left
    backoff_s: float = 1.0  # see `backoff_s` in `workers`
    standby: int = 0  # number of standby processes on each host
    token: str = ""  # identifies the run of a job on many hosts, once they have agreed; else empty
    # identifies the processes of this job on this host
    mark: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    hosts: HostsSpec | None = None  # `None` for a job on one host
    # name and value of each setting that must be equal on all hosts
    settings: tuple[tuple[str, str], ...] = ()
    health: HealthSpec | None = None  # what is checked before this host takes part
    metrics_host: str = DEFAULT_HOST
    # where metrics are served for Prometheus, 0 for a free port; `None` if they are not
    metrics_port: int | None = None
    opentelemetry: bool = False  # whether metrics and traces are sent by OTLP
    # known to the launchers of all hosts; `None` if the user has given none
    secret: Secret | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of a host in one attempt. The ranks of one host are consecutive."""

    store: tuple[str, int]  # host and port of the store: `MASTER_ADDR` and `MASTER_PORT`
    place: int = 0  # of this host, from 0
    places: int = 1  # the number of places at the start of the attempt, which gives `WORLD_SIZE`
    attempt: int = 0  # number of restarts of all workers so far
    # how many hosts had this place before in this attempt. If not 0, the workers are replacements,
    # and join the running call.
    taken_over: int = 0
    # further environment variables of the workers
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def ranks(self, nproc: int) -> range:
        return range(self.place * nproc, (self.place + 1) * nproc)

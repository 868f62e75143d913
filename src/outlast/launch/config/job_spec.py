"""The job specification: what to run, made from the options of `outlast run` and checked."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import itertools
import math
import os
import shlex
import uuid
from collections.abc import Sequence
from pathlib import Path

from outlast.errors import ChaosError
from outlast.launch.config.hosts_spec import NO_RUN_ID, HostsSpec, hosts_from_options, settings
from outlast.launch.config.memory import default_standbys
from outlast.launch.config.metrics_spec import MetricsSpec, metrics_from_options
from outlast.launch.config.options import RunOptions
from outlast.launch.config.secret import Secret, read_secret
from outlast.launch.config.slurm import SlurmStep
from outlast.launch.config.streams import Routes, Std, parse_std

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
        """The script and its arguments, as one would type them."""
        return shlex.join([*(["-m"] if self.module else []), self.name, *self.args])

    def command(self, interpreter: str, chaos: bool) -> list[str]:
        """The command line of a worker. Output is unbuffered, as with torchrun."""
        if not self.python:
            return [self.name, *self.args]
        # Faults are injected into the workers only, never into the launcher.
        bootstrap = ["-m", "outlast.chaos.bootstrap"] if chaos else []
        module = ["-m"] if self.module else []
        return [interpreter, "-u", *bootstrap, *module, self.name, *self.args]


@dataclasses.dataclass(frozen=True)
class BackOff:
    """The wait before a rank is replaced, which doubles with each death soon after a start.

    A long-lived process ends the series: its death says nothing about the next process. The first
    replacement of a series is immediate, so that a single fault costs no wait.

    Attributes:
        first_s: the first wait that is not zero.
        limit_s: the longest wait.
        soon_s: a process with a shorter lifetime than this died soon after its start.
    """

    first_s: float = 1.0
    limit_s: float = 60.0
    soon_s: float = 10.0

    def delay_s(self, lifetimes_s: Sequence[float]) -> float:
        """The wait before the next process of a rank, given the lifetimes of the earlier ones."""
        short_lived = itertools.takewhile(lambda s: s < self.soon_s, reversed(lifetimes_s))
        deaths = sum(1 for _ in short_lived)
        if deaths < 2:
            return 0.0
        # The exponent is bounded because a float overflows at 2**1024.
        return float(min(self.first_s * 2.0 ** min(deaths - 2, 64), self.limit_s))


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job, as the launcher of one host sees it.

    Attributes:
        nproc: number of workers on each host.
        max_restarts: `None` if not given; the default depends on the script, see `decisions`.
        chaos_state: the folder in which the workers keep which faults have fired.
        standby: number of standby processes on each host.
        mark: identifies the processes of this job on this host.
        token: identifies the run of a job on many hosts, once they have agreed; else empty.
        hosts: `None` for a job on one host.
        settings: name and value of each setting that must be equal on all hosts.
        secret: known to the launchers of all hosts; `None` if the user has given none.
    """

    program: Program
    nproc: int
    routes: Routes
    run_id: str
    max_restarts: int | None = None
    role: str = "default"
    master_addr: str = DEFAULT_HOST
    master_port: int = 0
    log_dir: Path | None = None
    events_dir: Path | None = None
    chaos: Path | None = None
    chaos_state: Path | None = None
    grace_s: float = 30.0
    backoff: BackOff = dataclasses.field(default_factory=BackOff)
    standby: int = 0
    token: str = ""
    mark: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    hosts: HostsSpec | None = None
    settings: tuple[tuple[str, str], ...] = ()
    metrics: MetricsSpec | None = None
    secret: Secret | None = None


def job_from_options(options: RunOptions, token: str = "") -> JobSpec:
    """Check the options, and `token`, which is `OUTLAST_TOKEN`; make the job specification.

    Raises:
        ValueError: if an option has a wrong value or conflicts with another; names the option.
    """
    if not (math.isfinite(options.grace) and math.isfinite(options.backoff)):
        raise ValueError("--grace and --backoff must be finite numbers of seconds")
    nproc = _nproc(options.nproc_per_node)
    program = _program(options)
    hosts = hosts_from_options(options)
    addr, port = _address(options) if hosts is None else (DEFAULT_HOST, 0)
    default_id = uuid.uuid4().hex[:8] if hosts is None else NO_RUN_ID
    run_id = default_id if options.run_id is None else options.run_id
    if not run_id or "/" in run_id or run_id in (".", ".."):
        raise ValueError(f"--run-id {run_id!r}: must be the name of a folder, without '/'")
    return JobSpec(
        program=program,
        nproc=nproc,
        routes=_routes(options, nproc),
        run_id=run_id,
        max_restarts=options.max_restarts,
        role=options.role,
        master_addr=addr,
        master_port=port,
        log_dir=_absolute(options.log_dir),
        events_dir=_absolute(options.events_dir),
        chaos=_chaos(options),
        grace_s=options.grace,
        backoff=BackOff(first_s=options.backoff),
        standby=_standby(options, alone=nproc == 1 and hosts is None),
        hosts=hosts,
        settings=() if hosts is None else settings(options, hosts),
        metrics=metrics_from_options(options),
        secret=read_secret(token, options.token_file),
    )


def in_step(options: RunOptions, step: SlurmStep | None) -> RunOptions:
    """The options, completed by the Slurm step in which the launcher runs, if there is one."""
    chosen = options.rdzv_endpoint or options.master_addr or options.standalone
    if step is None or chosen or options.nnodes in ("1", "1:1"):
        return options
    return dataclasses.replace(
        options,
        nnodes=options.nnodes or step.nnodes,
        rdzv_endpoint=step.endpoints,
        rdzv_backend="c10d",
        run_id=options.run_id or step.run_id,
    )


def _program(options: RunOptions) -> Program:
    if options.module and options.no_python:
        raise ValueError("--module and --no-python cannot be combined")
    if options.module:
        # Checks only the form of the name: whether it exists depends on the workers' sys.path.
        if not all(part.isidentifier() for part in options.script.split(".")):
            raise ValueError(f"-m {options.script}: not the name of a module")
    elif not options.no_python and not Path(options.script).exists():
        raise ValueError(f"no such script: {options.script}")
    args, script = tuple(options.args or ()), Path(options.script)
    python = not options.no_python
    wrapped = not options.module and python and script.is_file()
    wrapped = wrapped and has_wrapper(script.read_text(errors="replace"))
    return Program(options.script, args, options.module, python, wrapped)


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


def _standby(options: RunOptions, *, alone: bool) -> int:
    if options.standby and options.no_python:
        raise ValueError("--standby and --no-python cannot be combined: it imports Python modules")
    if options.standby is not None:
        return options.standby
    # The last worker of a job is not replaced.
    return 0 if options.no_python or alone else default_standbys()


def _chaos(options: RunOptions) -> Path | None:
    plan = _absolute(options.chaos)
    if plan is None:
        return None
    if options.no_python:
        raise ValueError("--chaos and --no-python cannot be combined: it needs Python workers")
    if not plan.is_file():
        raise ValueError(f"--chaos {options.chaos}: no such file")
    if importlib.util.find_spec("outlast.chaos") is None:
        raise ValueError("--chaos: outlast.chaos is not installed")
    # Imported by name, as in the workers: the launcher does not depend on fault injection.
    plans = importlib.import_module("outlast.chaos.plan")
    try:
        plans.Plan.load(options.chaos)
    except ChaosError as e:
        raise ValueError(f"--chaos {e}") from e
    return plan


def _nproc(text: str) -> int:
    if text in ("cpu", "gpu", "auto"):
        import torch  # here, because it takes a second and the other values do not need it

        if text == "gpu":
            if not torch.cuda.is_available():
                raise ValueError("--nproc-per-node gpu: no GPU is available")
            return torch.cuda.device_count()
        if text == "auto" and torch.accelerator.is_available():
            return torch.accelerator.device_count()
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"--nproc-per-node {text}: must be a number of at least 1, or cpu, gpu or auto"
        )
    return int(text)


def _address(options: RunOptions) -> tuple[str, int]:
    """The address of the store; the more specific option takes precedence."""
    host, port = None, 0
    if options.rdzv_endpoint:
        host, _, digits = options.rdzv_endpoint.rpartition(":")
        if not host:
            host, digits = digits, "0"
        if not digits.isdecimal() or int(digits) > 65535:
            raise ValueError(f"--rdzv-endpoint {options.rdzv_endpoint}: must be HOST or HOST:PORT")
        port = int(digits)
    addr = options.master_addr or options.local_addr or host or DEFAULT_HOST
    return addr.strip("[]"), options.master_port or port


def _routes(options: RunOptions, nproc: int) -> Routes:
    tee = options.tee
    if options.log_dir is not None and tee is None and options.redirects is None:
        tee = "3"
    shown = frozenset(range(nproc))
    if (text := options.local_ranks_filter) is not None:
        ranks = text.split(",")
        if not all(rank.strip().isdecimal() for rank in ranks):
            raise ValueError(f"--local-ranks-filter {text}: must be a list such as 0,2,3")
        shown = frozenset(int(rank) for rank in ranks)
    redirects = _std("--redirects", options.redirects, nproc)
    return Routes(redirects, _std("--tee", tee, nproc), shown)


def _std(option: str, text: str | None, nproc: int) -> dict[int, Std]:
    try:
        return parse_std("0" if text is None else text, nproc)
    except ValueError as e:
        raise ValueError(f"{option} {e}") from e


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()

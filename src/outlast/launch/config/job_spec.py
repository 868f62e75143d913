"""What is to be run, checked: made from the options of `outlast run`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
import uuid
from pathlib import Path

from outlast.errors import ChaosError
from outlast.launch.config.backoff import BackOff
from outlast.launch.config.options import RunOptions
from outlast.launch.config.streams import Routes, Std, parse_std

__all__ = ["Job", "Program", "job_from_options"]

DEFAULT_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Program:
    """What every worker runs.

    Attributes:
        name: of the script, module or program.
        args: its arguments.
        module: `name` is a Python module.
        python: it is run by Python.
    """

    name: str
    args: tuple[str, ...] = ()
    module: bool = False
    python: bool = True

    def command(self, interpreter: str, chaos: bool) -> list[str]:
        """The command line of a worker. Output is unbuffered, as torchrun has it."""
        if not self.python:
            return [self.name, *self.args]
        # The injector is for the workers, by its name: the launcher itself is never hit.
        bootstrap = ["-m", "outlast.chaos.bootstrap"] if chaos else []
        module = ["-m"] if self.module else []
        return [interpreter, "-u", *bootstrap, *module, self.name, *self.args]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A job of one node. `max_restarts` is `None` if not given: see `decisions`.
    `chaos_state` is where the workers keep which faults have fired.
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
    mark: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


def job_from_options(options: RunOptions) -> Job:
    """The job that was asked for.

    Raises:
        ValueError: if an option has a wrong value, or does not go with another; names it.
    """
    if options.nnodes not in ("1", "1:1"):
        raise ValueError(f"--nnodes {options.nnodes}: outlast run starts a job on one node only")
    if options.node_rank != 0:
        raise ValueError(f"--node-rank {options.node_rank}: there is one node, of rank 0")
    if not (math.isfinite(options.grace) and math.isfinite(options.backoff)):
        raise ValueError("--grace and --backoff are finite numbers of seconds")
    nproc = _nproc(options.nproc_per_node)
    addr, port = _address(options)
    run_id = uuid.uuid4().hex[:8] if options.run_id is None else options.run_id
    if not run_id or "/" in run_id or run_id in (".", ".."):
        raise ValueError(f"--run-id {run_id!r}: it names a folder, so it is one word without '/'")
    return Job(
        program=_program(options),
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
    )


def _program(options: RunOptions) -> Program:
    if options.module and options.no_python:
        raise ValueError("--module and --no-python do not go together")
    if options.module:
        _check_module(options.script)
    elif not options.no_python and not Path(options.script).exists():
        raise ValueError(f"no such script: {options.script}")
    return Program(
        name=options.script,
        args=tuple(options.args or ()),
        module=options.module,
        python=not options.no_python,
    )


def _check_module(name: str) -> None:
    # Only that the name can be one: whether it is found depends on the workers' own paths.
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"-m {name}: this is no name of a module")


def _chaos(options: RunOptions) -> Path | None:
    plan = _absolute(options.chaos)
    if plan is None:
        return None
    if options.no_python:
        raise ValueError("--chaos and --no-python do not go together: it runs in Python workers")
    if not plan.is_file():
        raise ValueError(f"--chaos {options.chaos}: no such file")
    if importlib.util.find_spec("outlast.chaos") is None:
        raise ValueError("--chaos: outlast.chaos is not installed")
    # By its name, as the workers are given it: the launcher itself knows nothing of faults.
    plans = importlib.import_module("outlast.chaos.plan")
    try:
        plans.Plan.load(options.chaos)
    except ChaosError as e:
        raise ValueError(f"--chaos {e}") from e
    return plan


def _nproc(text: str) -> int:
    if text in ("cpu", "gpu", "auto"):
        import torch  # only these need it, and it takes a second

        if text == "gpu":
            if not torch.cuda.is_available():
                raise ValueError("--nproc-per-node gpu: there is no GPU")
            return torch.cuda.device_count()
        if text == "auto" and torch.accelerator.is_available():
            return torch.accelerator.device_count()
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"--nproc-per-node {text}: it is a number of at least 1, or cpu, gpu or auto"
        )
    return int(text)


def _address(options: RunOptions) -> tuple[str, int]:
    """Where the store listens; what is said most directly wins."""
    host, port = None, 0
    if options.rdzv_endpoint:
        host, _, digits = options.rdzv_endpoint.rpartition(":")
        if not host:
            host, digits = digits, "0"
        if not digits.isdecimal() or int(digits) > 65535:
            raise ValueError(f"--rdzv-endpoint {options.rdzv_endpoint}: it is HOST or HOST:PORT")
        port = int(digits)
    addr = options.master_addr or options.local_addr or host or DEFAULT_HOST
    return addr.strip("[]"), options.master_port or port


def _routes(options: RunOptions, nproc: int) -> Routes:
    tee = options.tee
    if options.log_dir is not None and tee is None and options.redirects is None:
        tee = "3"
    shown = frozenset(range(nproc))
    if options.local_ranks_filter is not None:
        ranks = options.local_ranks_filter.split(",")
        if not all(rank.strip().isdecimal() for rank in ranks):
            raise ValueError(
                f"--local-ranks-filter {options.local_ranks_filter}: it is a list as in 0,2,3"
            )
        shown = frozenset(int(rank) for rank in ranks)
    return Routes(
        redirects=_std("--redirects", options.redirects, nproc),
        tee=_std("--tee", tee, nproc),
        shown=shown,
    )


def _std(option: str, text: str | None, nproc: int) -> dict[int, Std]:
    try:
        return parse_std("0" if text is None else text, nproc)
    except ValueError as e:
        raise ValueError(f"{option} {e}") from e


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()

"""Makes the specification of a job from the options of `outlast run`, and checks them."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import tempfile
import uuid
from pathlib import Path

from outlast.errors import ChaosError
from outlast.launch.config.hosts_spec import NO_RUN_ID, fault_limit, hosts_from_options, settings
from outlast.launch.config.job_spec import (
    DEFAULT_HOST,
    HealthSpec,
    JobSpec,
    Program,
    Routes,
    Std,
    has_wrapper,
)
from outlast.launch.config.options import RunOptions
from outlast.launch.config.secret import read_secret
from outlast.system.shared_memory import available_bytes

LEVELS = ("off", "quick", "full")
_FREE_GB = 1.0
STANDBY_BYTES = 512 * 1024**2
"""Estimate of the memory of a process that has imported torch and a script's other packages."""
_PROC = Path("/proc/self/stat")


def job_from_options(options: RunOptions, token: str = "") -> JobSpec:
    """Check the options, and `token`, which is `OUTLAST_TOKEN`; make the job specification. A
    `ValueError` names the option.
    """
    if not (math.isfinite(options.grace) and math.isfinite(options.backoff)):
        raise ValueError("--grace and --backoff must be finite numbers of seconds")
    if not _PROC.exists():
        raise ValueError(
            "/proc is not mounted, and shows the processes of a job and their connections; "
            "mount it with: mount -t proc proc /proc"
        )
    require_exporters("--metrics-port", options.metrics_port, options.opentelemetry)
    if options.on_signal not in ("leave", "stop"):
        raise ValueError(f"--on-signal {options.on_signal}: must be leave or stop")
    if not 0 <= options.leave_exit_code < 256:
        raise ValueError(f"--leave-exit-code {options.leave_exit_code}: must be from 0 to 255")
    nproc = _nproc(options.nproc_per_node)
    program = _program(options)
    hosts = hosts_from_options(options)
    addr, port = _address(options) if hosts is None else (DEFAULT_HOST, 0)
    default_id = uuid.uuid4().hex[:8] if hosts is None else NO_RUN_ID
    run_id = default_id if options.run_id is None else options.run_id
    if not run_id or "/" in run_id or run_id in (".", ".."):
        raise ValueError(f"--run-id {run_id!r}: must be the name of a folder, without '/'")
    max_restarts, window_s = fault_limit("--max-restarts", options.max_restarts, 0)
    return JobSpec(
        program=program,
        nproc=nproc,
        routes=_routes(options, nproc),
        run_id=run_id,
        max_restarts=max_restarts,
        restart_window_s=window_s,
        role=options.role,
        master_addr=addr,
        master_port=port,
        log_dir=_absolute(options.log_dir),
        events_dir=_absolute(options.events_dir),
        chaos=_chaos(options),
        grace_s=options.grace,
        leaves_on_signal=options.on_signal == "leave",
        leave_exit_code=options.leave_exit_code,
        backoff_s=options.backoff,
        standby=_standby(options, alone=nproc == 1 and hosts is None),
        hosts=hosts,
        settings=() if hosts is None else settings(options, hosts),
        health=_health(options),
        metrics_host=options.metrics_host,
        metrics_port=options.metrics_port,
        opentelemetry=options.opentelemetry,
        secret=read_secret(token, options.token_file),
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

        if text != "cpu" and torch.accelerator.is_available():
            return torch.accelerator.device_count()
        if text == "gpu":
            raise ValueError("--nproc-per-node gpu: no GPU or other accelerator is available")
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"--nproc-per-node {text}: must be a number of at least 1, or cpu, gpu or auto"
        )
    return int(text)


def _address(options: RunOptions) -> tuple[str, int]:
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


def parse_std(text: str, nproc: int) -> dict[int, Std]:
    """Parse the streams of each local rank: `3` for all ranks, or `0:1,1:2` (others: none)."""
    text = text.removeprefix("=")  # argparse, and so torchrun, accepts `-r=3`
    if ":" not in text:
        return dict.fromkeys(range(nproc), _one_std(text, text))
    chosen = dict.fromkeys(range(nproc), Std.NONE)
    for item in text.split(","):
        rank, _, value = item.partition(":")
        if not rank.strip().isdecimal() or int(rank) >= nproc:
            raise ValueError(f"{text!r}: {rank!r} is not a local rank from 0 to {nproc - 1}")
        chosen[int(rank)] = _one_std(value, text)
    return chosen


def _one_std(value: str, text: str) -> Std:
    if value.strip() not in ("0", "1", "2", "3"):
        raise ValueError(
            f"{text!r}: {value!r} is not one of 0 (none), 1 (stdout), 2 (stderr), 3 (both)"
        )
    return Std(int(value))


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _health(options: RunOptions) -> HealthSpec | None:
    """What to check; `None` for nothing. A `ValueError` names the option."""
    level, limit_s = options.health_check, options.health_timeout
    free = _FREE_GB if options.health_free is None else options.health_free
    if level not in LEVELS:
        raise ValueError(f"--health-check {level}: must be off, quick or full")
    if not math.isfinite(free) or free < 0:
        raise ValueError(f"--health-free {free:g}: must be a number of GB, at least 0")
    if not math.isfinite(limit_s) or limit_s <= 0:
        raise ValueError(f"--health-timeout {limit_s:g}: must be a positive number of seconds")
    for name in ("health_folder", "health_free") if level == "off" else ():
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: no folder is checked without --health-check quick")
    if options.health_interval is not None and options.health_command is None:
        raise ValueError("--health-interval: there is no --health-command to run")
    if level == "off" and options.health_command is None:
        return None
    if options.health_command is not None and not options.health_command.strip():
        raise ValueError("--health-command: must not be empty")
    folder = options.health_folder or options.log_dir or options.events_dir
    return HealthSpec(
        level=level,
        folder=str(Path(folder or tempfile.gettempdir()).absolute()),
        free_bytes=int(free * 1e9),
        command=options.health_command or "",
        limit_s=limit_s,
        interval_s=options.health_interval,
    )


def require_exporters(port_option: str, port: int | None, opentelemetry: bool) -> None:
    """Checks that the optional packages that serve and send metrics are installed."""
    packages = []
    if port is not None:
        packages.append(("prometheus_client", port_option, "prometheus"))
    if opentelemetry:
        packages.append(("opentelemetry.sdk", "--opentelemetry", "opentelemetry"))
        packages.append(("opentelemetry.exporter.otlp", "--opentelemetry", "opentelemetry"))
    for package, option, extra in packages:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # its parent package
            found = None
        if found is None:
            raise ValueError(
                f"{option}: the package {package} is not installed; "
                f"install it with: pip install 'outlast[{extra}]'"
            )


def default_standbys() -> int:
    """One standby process, if twice its memory is available; otherwise none."""
    return 1 if available_bytes() > 2 * STANDBY_BYTES else 0

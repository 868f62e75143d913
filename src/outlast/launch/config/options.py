"""The options of `outlast run`, one field each, after which it is named, as by torchrun.

The types are those of the command line; `from_options.py` checks the values and makes a `JobSpec`
of them. torchrun's own parser is not used, because importing it imports torch, which takes seconds;
a test compares names and defaults with it.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated

import typer

_job = functools.partial(typer.Option, rich_help_panel="The job")
_faults = functools.partial(typer.Option, rich_help_panel="Faults")
_output = functools.partial(typer.Option, rich_help_panel="Output and events")
_health = functools.partial(typer.Option, rich_help_panel="Health of this host")
_hosts = functools.partial(typer.Option, rich_help_panel="Many hosts")
_rare = functools.partial(typer.Option, hidden=True)
"""Accepted, and left out of the help: few people set it, or it is there for the command lines of
torchrun. `docs/launcher.md` lists these.
"""


@dataclasses.dataclass(kw_only=True)
class RunOptions:
    """The arguments and options of `outlast run`, as typed."""

    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python script, or a module with -m.")
    ]
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
    ] = None

    nproc_per_node: Annotated[
        str, _job(metavar="N|gpu|cpu|auto", help="Number of workers on each host.")
    ] = "1"
    module: Annotated[bool, _job("--module", "-m", help="SCRIPT is a module.")] = False
    no_python: Annotated[
        bool, _job("--no-python", help="SCRIPT is a program: run it without Python.")
    ] = False
    run_id: Annotated[
        str | None,
        _job(
            "--run-id",
            "--rdzv-id",
            metavar="NAME",
            help='Name of the run. Default: a new one; on many hosts "none", as with torchrun.',
        ),
    ] = None

    max_restarts: Annotated[
        str | None,
        _faults(
            metavar="N[/TIME]",
            help="With Wrapper: the job replaces N dead workers until a further training step is "
            "made, and then N again (default 3). Without: it restarts all workers N times (default "
            "0). With a TIME (90s, 10min, 1h, 2d): N within that time, in both cases.",
        ),
    ] = None
    standby: Annotated[
        int | None,
        _faults(
            min=0,
            metavar="N",
            help="Processes that have imported what the script imports, and take the place of a "
            "dead worker at once. Default: 1 if there is enough memory.",
        ),
    ] = None
    grace: Annotated[
        float,
        _faults(
            "--grace",
            "--shutdown-timeout",
            min=0,
            metavar="SECONDS",
            help="How long workers may take to end after a signal before they are killed.",
        ),
    ] = 30.0
    on_signal: Annotated[
        str,
        _faults(
            metavar="leave|stop",
            help="What SIGTERM or SIGINT to the launcher of one of several hosts means: this host "
            "leaves, and the others go on if they may; or the job stops.",
        ),
    ] = "leave"
    leave_exit_code: Annotated[
        int, _faults(metavar="CODE", help="Exit code if this host has left the job.")
    ] = 0
    chaos: Annotated[
        Path | None, _faults(metavar="PLAN", help="Inject the faults of this plan.")
    ] = None

    log_dir: Annotated[
        Path | None, _output(metavar="DIR", help="Folder of output files. Alone: --tee 3.")
    ] = None
    redirects: Annotated[
        str | None,
        _output(
            "--redirects",
            "-r",
            metavar="SPEC",
            help="Output that goes to files only. 1: stdout, 2: stderr, 3: both; "
            "or by local rank: 0:3,1:2.",
        ),
    ] = None
    tee: Annotated[
        str | None,
        _output(
            "--tee", "-t", metavar="SPEC", help="Output that goes to files and to the console."
        ),
    ] = None
    local_ranks_filter: Annotated[
        str | None, _output(metavar="RANKS", help="Show only these ranks on the console, e.g. 0,3.")
    ] = None
    events_dir: Annotated[
        Path | None,
        _output(
            metavar="DIR",
            help="Write events to a folder of this run in DIR, for `outlast report` and "
            "`outlast top`.",
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        _output(
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve metrics of this host for Prometheus at this port; 0 for a free one.",
        ),
    ] = None
    opentelemetry: Annotated[
        bool,
        _output(
            "--opentelemetry",
            help="Send metrics and traces by OTLP, as the OTEL_* environment variables say.",
        ),
    ] = False

    health_check: Annotated[
        str,
        _health(
            metavar="off|quick|full",
            help="Check this host before it takes part in the job. quick: memory, shared memory, "
            "and a file in --health-folder; full: also the accelerators, or else the CPU, and the "
            "network, by an all-reduce with other hosts.",
        ),
    ] = "off"
    health_command: Annotated[
        str | None,
        _health(
            metavar="COMMAND",
            help="A check of your own: with an exit code other than 0, this host takes no part.",
        ),
    ] = None
    health_interval: Annotated[
        float | None,
        _health(
            min=1,
            metavar="SECONDS",
            help="Run --health-command again so often while the job runs: if it fails, this host "
            "leaves, as by `outlast drain`, if the job can go on without it.",
        ),
    ] = None
    health_folder: Annotated[
        Path | None,
        _health(
            metavar="DIR",
            help="The folder of the checkpoints, for example. Default: that of --log-dir or "
            "--events-dir, else that of temporary files.",
        ),
    ] = None
    health_free: Annotated[
        float | None,
        _health(
            metavar="GB",
            help="How much must be free in --health-folder and in /dev/shm. Default: 1.",
        ),
    ] = None
    health_timeout: Annotated[
        float, _health(metavar="SECONDS", help="How long each check may take; then it has failed.")
    ] = 60.0

    nnodes: Annotated[
        str | None,
        _hosts(
            metavar="N|MIN:MAX",
            help="Number of hosts; the same command runs on each. Default: 1, or the nodes of the "
            "Slurm step.",
        ),
    ] = None
    rdzv_endpoint: Annotated[
        str | None,
        _hosts(
            metavar="HOST[:PORT],...",
            help="Where hosts meet, the same on all hosts. Any one of several is enough.",
        ),
    ] = None
    rdzv_backend: Annotated[
        str,
        _hosts(
            metavar="BACKEND",
            help="c10d: hosts meet at the hosts of --rdzv-endpoint; etcd: at an etcd v3 there; "
            "static: as c10d, with the places of --node-rank. Default: c10d with "
            "--rdzv-endpoint, else static.",
            show_default=False,
        ),
    ] = "static"
    node_rank: Annotated[
        int, _hosts(metavar="N", help="Place of this host; only with --rdzv-backend static.")
    ] = 0
    rank_order: Annotated[
        str | None,
        _hosts(
            metavar="FILE|COMMAND",
            help="The order of the hosts, which ranks follow: a file with the name or address of "
            "each on a line, or a shell command that prints where this host is in the network, as "
            "rack3.switch12. Default: the order of Slurm's switches and tasks, or that of "
            "OUTLAST_TOPOLOGY and Kubernetes' completion indexes; else of joining.",
        ),
    ] = None
    rdzv_conf: Annotated[
        str,
        _hosts(
            metavar="NAME=VALUE,...",
            help="join_timeout: seconds to wait for MIN hosts (600); last_call_timeout: seconds "
            "to wait for more once MIN hosts have joined (30); record_dir: where this host keeps "
            "what it knows of the job's hosts (in /var/tmp). For etcd: protocol, cacert, "
            "cert, key, user, password_file.",
        ),
    ] = ""
    host_timeout: Annotated[
        float,
        _hosts(
            metavar="SECONDS",
            help="How long a host may be silent: after that it has ended its workers, and the "
            "other hosts go on without it.",
        ),
    ] = 5.0
    replacement_timeout: Annotated[
        float | None,
        _hosts(
            metavar="SECONDS",
            help="How long the ranks of a lost host wait for another host. Default: 1 if the job "
            "may continue with the hosts that are left, otherwise 600.",
        ),
    ] = None
    max_host_faults: Annotated[
        str | None,
        _hosts(
            metavar="N[/TIME]",
            help="After N faults of its ranks (within TIME), a host gets no more ranks: it "
            "leaves the job, as if it was lost. Default: no limit.",
        ),
    ] = None
    leave_when: Annotated[
        str | None,
        _hosts(
            metavar="COMMAND|FILE",
            help="This host leaves the job once COMMAND, which waits for a notice of the cloud for "
            "example, has succeeded, or FILE (an absolute path) exists.",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        _hosts(
            metavar="FILE",
            help="A file with the secret of the job, the same on all hosts, which only its owner "
            "may read. Hosts admit only hosts that know it. Default: the environment variable "
            "OUTLAST_TOKEN.",
        ),
    ] = None

    backoff: Annotated[float, _rare("--backoff", min=0)] = 1.0
    role: Annotated[str, _rare("--role")] = "default"
    master_addr: Annotated[str | None, _rare("--master-addr")] = None
    master_port: Annotated[int, _rare("--master-port", min=0, max=65535)] = 0
    local_addr: Annotated[str | None, _rare("--local-addr")] = None
    metrics_host: Annotated[str, _rare("--metrics-host")] = "127.0.0.1"
    standalone: Annotated[bool, _rare("--standalone")] = False
    start_method: Annotated[str, _rare("--start-method")] = "spawn"
    monitor_interval: Annotated[float, _rare("--monitor-interval")] = 0.1

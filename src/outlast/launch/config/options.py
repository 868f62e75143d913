"""The options of `outlast run`, one field each, with torchrun's names and meanings.

The types are those of the command line; `job_spec.py` checks the values and makes a `JobSpec` of
them. torchrun's own parser is not used, because importing it imports torch, which takes seconds; a
test compares names and defaults with it.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated

import typer

_torchrun = functools.partial(typer.Option, rich_help_panel="As in torchrun")
_outlast = functools.partial(typer.Option, rich_help_panel="Beyond torchrun")
_accepted = functools.partial(typer.Option, rich_help_panel="Accepted for torchrun's command lines")


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
        str,
        _torchrun("--nproc-per-node", metavar="N|cpu|gpu|auto", help="Number of workers."),
    ] = "1"
    max_restarts: Annotated[
        int | None,
        _torchrun(
            "--max-restarts",
            min=0,
            help="With Wrapper: number of dead workers to replace in the whole job (default 3). "
            "Without: number of restarts of all workers (default 0).",
            show_default=False,
        ),
    ] = None
    module: Annotated[bool, _torchrun("--module", "-m", help="SCRIPT is a module.")] = False
    no_python: Annotated[
        bool, _torchrun("--no-python", help="SCRIPT is a program: run it without Python.")
    ] = False
    log_dir: Annotated[
        Path | None,
        _torchrun("--log-dir", help="Folder of output files. Alone it means --tee 3."),
    ] = None
    redirects: Annotated[
        str | None,
        _torchrun(
            "--redirects",
            "-r",
            metavar="SPEC",
            help="Output that goes to files only. 1: stdout, 2: stderr, 3: both; "
            "or by local rank: 0:3,1:2.",
        ),
    ] = None
    tee: Annotated[
        str | None,
        _torchrun(
            "--tee", "-t", metavar="SPEC", help="Output that goes to files and to the console."
        ),
    ] = None
    local_ranks_filter: Annotated[
        str | None,
        _torchrun(
            "--local-ranks-filter",
            metavar="RANKS",
            help="Show only these ranks on the console, e.g. 0,3.",
        ),
    ] = None
    run_id: Annotated[
        str | None,
        _torchrun(
            "--run-id",
            "--rdzv-id",
            help='Name of the run. Default: a new one; on many hosts "none", as with torchrun.',
            show_default=False,
        ),
    ] = None
    role: Annotated[str, _torchrun("--role", help="Name of the workers' role.")] = "default"
    master_addr: Annotated[
        str | None,
        _torchrun(
            "--master-addr",
            help="Address of the job's store. Default: 127.0.0.1.",
            show_default=False,
        ),
    ] = None
    master_port: Annotated[
        int, _torchrun("--master-port", min=0, max=65535, help="Its port; 0 for a free one.")
    ] = 0
    local_addr: Annotated[
        str | None,
        _torchrun(
            "--local-addr",
            help="Address of this host for the other hosts. With one host: the same as "
            "--master-addr.",
        ),
    ] = None
    nnodes: Annotated[
        str | None,
        _torchrun(
            "--nnodes",
            metavar="N|MIN:MAX",
            help="Number of hosts; the same command runs on each. Default: 1, or the nodes of the "
            "Slurm step.",
            show_default=False,
        ),
    ] = None
    node_rank: Annotated[
        int,
        _torchrun("--node-rank", help="Place of this host; only with --rdzv-backend static."),
    ] = 0
    rdzv_backend: Annotated[
        str,
        _torchrun(
            "--rdzv-backend",
            metavar="c10d|etcd|static",
            help="Where hosts meet. c10d: at the hosts of --rdzv-endpoint; etcd: at an etcd v3 "
            "there; static: as c10d, with the places of --node-rank. Default: c10d with "
            "--rdzv-endpoint, else static. No effect with one host.",
            show_default=False,
        ),
    ] = "static"
    rdzv_endpoint: Annotated[
        str | None,
        _torchrun(
            "--rdzv-endpoint",
            metavar="HOST[:PORT][,...]",
            help="Where hosts meet, the same on all hosts. Any one of several is enough. With one "
            "host: the same as --master-addr and --master-port.",
        ),
    ] = None
    rdzv_conf: Annotated[
        str,
        _torchrun(
            "--rdzv-conf",
            metavar="NAME=VALUE[,...]",
            help="join_timeout: seconds to wait for MIN hosts (600); last_call_timeout: seconds "
            "to wait for more once MIN hosts have joined (30); record_dir: where this host keeps "
            "what it knows of the job's hosts (in /var/tmp). For etcd: protocol, cacert, "
            "cert, key, user, password_file.",
        ),
    ] = ""

    events_dir: Annotated[
        Path | None,
        _outlast(
            "--events-dir",
            metavar="DIR",
            help="Write events to a folder of this run in DIR; see `outlast report`.",
        ),
    ] = None
    chaos: Annotated[
        Path | None, _outlast("--chaos", metavar="PLAN", help="Inject the faults of this plan.")
    ] = None
    grace: Annotated[
        float,
        _outlast(
            "--grace",
            "--shutdown-timeout",
            min=0,
            metavar="SECONDS",
            help="Time from SIGTERM (or the signal received) to SIGKILL for the workers.",
        ),
    ] = 30.0
    backoff: Annotated[
        float,
        _outlast(
            "--backoff",
            min=0,
            metavar="SECONDS",
            help="Wait before replacing a rank that died twice soon after its start; doubles with "
            "each further death. The first replacement never waits.",
        ),
    ] = 1.0
    standby: Annotated[
        int | None,
        _outlast(
            "--standby",
            min=0,
            metavar="K",
            help="Processes that have imported what the script imports, and take the place of a "
            "dead worker at once. Default: 1 if there is enough memory.",
            show_default=False,
        ),
    ] = None

    host_timeout: Annotated[
        float,
        _outlast(
            "--host-timeout",
            metavar="SECONDS",
            help="How long a host may be silent: after that it has ended its workers, and the "
            "other hosts go on without it.",
        ),
    ] = 5.0
    replacement_timeout: Annotated[
        float | None,
        _outlast(
            "--replacement-timeout",
            metavar="SECONDS",
            help="How long the ranks of a lost host wait for another host. Default: 1 if the job "
            "may continue with the hosts that are left, otherwise 600.",
            show_default=False,
        ),
    ] = None

    token_file: Annotated[
        Path | None,
        _outlast(
            "--token-file",
            metavar="FILE",
            help="A file with the secret of the job, the same on all hosts, which only its owner "
            "may read. Hosts admit only hosts that know it. Default: the environment variable "
            "OUTLAST_TOKEN.",
            show_default=False,
        ),
    ] = None

    metrics_port: Annotated[
        int | None,
        _outlast(
            "--metrics-port",
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve metrics of this host for Prometheus at this port; 0 for a free one.",
            show_default=False,
        ),
    ] = None
    metrics_host: Annotated[
        str, _outlast("--metrics-host", metavar="ADDRESS", help="The address of that port.")
    ] = "127.0.0.1"
    opentelemetry: Annotated[
        bool,
        _outlast(
            "--opentelemetry",
            help="Send metrics and traces by OTLP, as the OTEL_* environment variables say.",
        ),
    ] = False

    standalone: Annotated[bool, _accepted("--standalone", help="One host, as is the default.")] = (
        False
    )
    start_method: Annotated[
        str, _accepted("--start-method", help="No effect: workers are always new processes.")
    ] = "spawn"
    monitor_interval: Annotated[
        float, _accepted("--monitor-interval", help="No effect: the launcher does not poll.")
    ] = 0.1

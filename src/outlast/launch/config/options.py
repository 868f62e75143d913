"""What can be typed after `outlast run`: a field an option, with torchrun's names and meanings.

The types are those of the command line; `config/job_spec.py` checks the values and makes a `Job` of
them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["RunOptions"]

_TORCHRUN = "As torchrun's"
_OURS = "Beyond torchrun"
_ACCEPTED = "Accepted from torchrun's command lines"


@dataclasses.dataclass(kw_only=True)
class RunOptions:
    """The arguments and options of `outlast run`, as typed."""

    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python script; with -m a module.")
    ]
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")
    ] = None

    nproc_per_node: Annotated[
        str,
        typer.Option(
            "--nproc-per-node",
            metavar="N|cpu|gpu|auto",
            help="How many workers.",
            rich_help_panel=_TORCHRUN,
        ),
    ] = "1"
    max_restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts",
            min=0,
            help="With Wrapper: how many dead workers are replaced in the whole job (default 3). "
            "Without: how often all workers are restarted (default 0).",
            show_default=False,
            rich_help_panel=_TORCHRUN,
        ),
    ] = None
    module: Annotated[
        bool,
        typer.Option("--module", "-m", help="SCRIPT is a module.", rich_help_panel=_TORCHRUN),
    ] = False
    no_python: Annotated[
        bool,
        typer.Option(
            "--no-python",
            help="SCRIPT is a program: run it without Python.",
            rich_help_panel=_TORCHRUN,
        ),
    ] = False
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            help="Where output goes into files; alone it means --tee 3.",
            rich_help_panel=_TORCHRUN,
        ),
    ] = None
    redirects: Annotated[
        str | None,
        typer.Option(
            "--redirects",
            "-r",
            metavar="SPEC",
            help="Output that goes into files only. 1: stdout, 2: stderr, 3: both; "
            "or by local rank: 0:3,1:2.",
            rich_help_panel=_TORCHRUN,
        ),
    ] = None
    tee: Annotated[
        str | None,
        typer.Option(
            "--tee",
            "-t",
            metavar="SPEC",
            help="Output that goes into files and to the console.",
            rich_help_panel=_TORCHRUN,
        ),
    ] = None
    local_ranks_filter: Annotated[
        str | None,
        typer.Option(
            "--local-ranks-filter",
            metavar="RANKS",
            help="Show only these on the console, e.g. 0,3.",
            rich_help_panel=_TORCHRUN,
        ),
    ] = None
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id",
            "--rdzv-id",
            help="Name of the run. Default: a new one.",
            show_default=False,
            rich_help_panel=_TORCHRUN,
        ),
    ] = None
    role: Annotated[
        str, typer.Option("--role", help="Name of the workers.", rich_help_panel=_TORCHRUN)
    ] = "default"
    master_addr: Annotated[
        str | None,
        typer.Option(
            "--master-addr",
            help="Address on which the job's store listens. Default: 127.0.0.1.",
            show_default=False,
            rich_help_panel=_TORCHRUN,
        ),
    ] = None
    master_port: Annotated[
        int,
        typer.Option(
            "--master-port",
            min=0,
            max=65535,
            help="Its port; 0 for one that is free.",
            rich_help_panel=_TORCHRUN,
        ),
    ] = 0
    local_addr: Annotated[
        str | None,
        typer.Option(
            "--local-addr",
            help="The same as --master-addr, on a job of one node.",
            rich_help_panel=_TORCHRUN,
        ),
    ] = None

    events_dir: Annotated[
        Path | None,
        typer.Option(
            "--events-dir",
            metavar="DIR",
            help="Write what happens to a folder of this run in DIR; see `outlast report`.",
            rich_help_panel=_OURS,
        ),
    ] = None
    chaos: Annotated[
        Path | None,
        typer.Option(
            "--chaos",
            metavar="PLAN",
            help="Inject the faults of this plan.",
            rich_help_panel=_OURS,
        ),
    ] = None
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            "--shutdown-timeout",
            min=0,
            metavar="SECONDS",
            help="From asking workers to end (SIGTERM, or the signal received) to SIGKILL.",
            rich_help_panel=_OURS,
        ),
    ] = 30.0
    backoff: Annotated[
        float,
        typer.Option(
            "--backoff",
            min=0,
            metavar="SECONDS",
            help="Wait this long before a rank that died twice soon after its start is replaced, "
            "twice as long the next time, and so on. The first time nothing waits.",
            rich_help_panel=_OURS,
        ),
    ] = 1.0

    nnodes: Annotated[str, typer.Option("--nnodes", help="Only 1.", rich_help_panel=_ACCEPTED)] = (
        "1"
    )
    node_rank: Annotated[
        int, typer.Option("--node-rank", help="Only 0.", rich_help_panel=_ACCEPTED)
    ] = 0
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone", help="No effect: every run is one.", rich_help_panel=_ACCEPTED
        ),
    ] = False
    start_method: Annotated[
        str,
        typer.Option(
            "--start-method",
            help="No effect: workers are always new processes.",
            rich_help_panel=_ACCEPTED,
        ),
    ] = "spawn"
    monitor_interval: Annotated[
        float,
        typer.Option(
            "--monitor-interval",
            help="No effect: nothing polls.",
            rich_help_panel=_ACCEPTED,
        ),
    ] = 0.1
    rdzv_backend: Annotated[
        str,
        typer.Option(
            "--rdzv-backend",
            help="No effect: the launcher hosts the store.",
            rich_help_panel=_ACCEPTED,
        ),
    ] = "static"
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            "--rdzv-endpoint",
            metavar="HOST[:PORT]",
            help="The same as --master-addr and --master-port.",
            rich_help_panel=_ACCEPTED,
        ),
    ] = None

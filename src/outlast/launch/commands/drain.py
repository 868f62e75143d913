"""`outlast drain`: has hosts leave a running job, whose ranks move to others; or moves one rank to
another process of its host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.errors import LaunchError, StoreError
from outlast.launch import environment
from outlast.launch.commands.shared import exit_on
from outlast.launch.config.hosts_spec import NO_RUN_ID, HostsSpec, hosts_from_options
from outlast.launch.config.options import RunOptions
from outlast.launch.config.secret import Secret, read_secret

_MOVES = "is to move to another process of its host"


def drain(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOST...",
            help="Hosts by name (as in `outlast top`), address or ID.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Instead of hosts: this rank, as the launcher numbers it, moves to another "
            "process of its host.",
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT],...",
            help="As of `outlast run`. Without it, --rank is one of this machine.",
        ),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--rdzv-id", "--run-id", metavar="NAME", help="As of `outlast run`."),
    ] = None,
    rdzv_backend: Annotated[str, typer.Option(help="As of `outlast run`.")] = "c10d",
    rdzv_conf: Annotated[str, typer.Option(help="As of `outlast run`.")] = "",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="As of `outlast run`, or OUTLAST_TOKEN.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for the log.")] = "outlast drain",
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long to wait for an answer.")
    ] = 20.0,
) -> None:
    """Have HOSTs leave a running job, without the loss of a step. Their ranks move to spare hosts
    at the end of a step, once these are ready; or the job goes on without them, if it may. With
    --rank, one rank moves to a standby process of its host, or to a new one.

    Run it on any machine that reaches the endpoints. It returns when the job knows of it.
    """
    if bool(hosts) is (rank is not None):
        raise typer.BadParameter("give hosts, or a rank by --rank")
    if rdzv_endpoint is None:
        if rank is None:
            raise typer.BadParameter("give --rdzv-endpoint, to find the job of the hosts")
        from outlast.launch.agent.rank_requests import ask

        with exit_on(LaunchError):
            ask(run_id or "", rank, reason, timeout)
        typer.echo(f"rank {rank} {_MOVES}")
        return
    run_id = run_id or NO_RUN_ID
    options = RunOptions(
        script="",
        nnodes="2",
        rdzv_endpoint=rdzv_endpoint,
        rdzv_backend=rdzv_backend,
        rdzv_conf=rdzv_conf,
    )
    try:
        spec = hosts_from_options(options)
        secret = read_secret(environment.take_token(), token_file)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    assert spec is not None
    with exit_on(LaunchError, StoreError):
        wanted = tuple(hosts or ()), -1 if rank is None else rank, reason
        for line in _ask(spec, run_id, wanted, secret, timeout):
            typer.echo(f"{line} {f'is to leave run {run_id!r}' if rank is None else _MOVES}")


def _ask(
    spec: HostsSpec,
    run_id: str,
    wanted: tuple[tuple[str, ...], int, str],
    secret: Secret | None,
    timeout: float,
) -> list[str]:
    if spec.backend == "etcd":
        from outlast.launch.hosts.etcd.asking import ask_etcd

        return ask_etcd(spec, run_id, *wanted)
    from outlast.launch.hosts.replicated.asking import ask
    from outlast.launch.hosts.replicated.messages import Drain

    return list(ask(run_id, spec.endpoints, secret, Drain(*wanted), timeout))

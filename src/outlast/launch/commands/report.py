"""`outlast report DIR`: the story of a run, from the events that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("report")(report)


def report(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="What was given to `outlast run --events-dir`.",
            exists=True,
            file_okay=False,
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON, for programs.")
    ] = False,
) -> None:
    """Print what happened in a run: each fault, its cause, and what the recovery took."""
    from rich.console import Console

    from outlast.errors import EventLogError
    from outlast.events.report import build, load, render, to_json

    try:
        if as_json:
            typer.echo(to_json(build(load(directory))))
        else:
            render(directory, Console())
    except EventLogError as e:
        typer.echo(f"outlast: error: {e}", err=True)
        raise typer.Exit(1) from e

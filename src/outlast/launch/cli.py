"""The `outlast` command: its sub-commands, one module each in `commands/`.

Nothing is imported here, nor in the modules of the commands, that takes long: a command imports
what it needs (torch above all) when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

import outlast
from outlast.launch.commands import checkpoint, report, run

__all__ = ["app", "main"]

app = typer.Typer(
    name="outlast",
    help="PyTorch training jobs that outlast their faults.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (run, report, checkpoint):
    command.register(app)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"outlast {outlast.__version__}")
        raise typer.Exit()


@app.callback()
def _outlast(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,  # or the missing command would be the first complaint
            help="Print the version, and end.",
        ),
    ] = False,
) -> None:
    # Without a callback, typer makes the only command the whole program.
    pass


def main() -> None:
    """Run the command line; ends the process with the command's exit code."""
    app()

"""The `outlast` command: its subcommands are in `commands/`, one module each.

Neither this module nor the command modules import anything slow: a command imports its dependencies
(mainly torch) when it runs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import outlast
from outlast.launch.commands import chaos, checkpoint, metrics, report, run, top
from outlast.launch.commands.shared import fold_help
from outlast.system.fast_exit import exit_fast

app = typer.Typer(
    name="outlast",
    help="PyTorch training jobs that outlast their faults.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
run.register(app)
for command in (report.report, top.top, metrics.metrics):
    app.command()(command)
checkpoint.register(app)
chaos.register(app)
fold_help(app)


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
            is_eager=True,  # otherwise typer first reports a missing command
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass  # typer attaches the program's options to a callback


def main() -> None:
    """Run the command line; exits with the command's exit code."""
    if not os.path.isfile(__file__):
        where = os.path.dirname(outlast.__file__)
        sys.exit(f"outlast starts programs of its own, and cannot read them in {where}: install it")
    _open_missing_streams()
    exit_fast()
    app()


def _open_missing_streams() -> None:
    """Opens those that this process was started without, as by `>&-` or some daemons: a socket of
    its own would get the number of one, and so what a child process prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = open(os.devnull, mode)  # noqa: SIM115 - it gets the lowest number, and stays
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)

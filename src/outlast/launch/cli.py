"""The `outlast` command, and `outlast run`; its other subcommands are in `commands/`.

Neither this module nor the command modules import anything slow: a command imports its dependencies
(mainly torch) when it runs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import outlast
from outlast.errors import HostUnfit, LaunchError
from outlast.launch import environment
from outlast.launch.commands import chaos, checkpoint, drain, live, report
from outlast.launch.commands.shared import UNFIT, exit_on, fold_help, with_options_of
from outlast.launch.config.from_options import job_from_options
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.config.options import RunOptions
from outlast.launch.config.slurm import in_step
from outlast.system.main_program import exit_fast


def run(options: RunOptions) -> None:
    """Start SCRIPT in several processes, and keep the job running through faults. For a job on many
    hosts, run the same command on each, with --nnodes and --rdzv-endpoint.

    If the script uses outlast.inprocess.Wrapper, survivors keep running and only a dead worker is
    replaced. With any other script, a failure restarts all workers, as with torchrun, if
    --max-restarts allows it.

    Command lines of torchrun are accepted as they are, also with options that are not listed here.
    """
    try:
        job = job_from_options(in_step(options, environment.step()), environment.take_token())
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    with exit_on(LaunchError), exit_on(HostUnfit, code=UNFIT):
        code = _run(job)
    raise typer.Exit(code)


def _run(job: JobSpec) -> int:
    from outlast.launch.agent.agent import Agent

    if job.hosts is None:
        from outlast.launch.agent.coordinator import OneHost
        from outlast.launch.health.host_check import check_host
        from outlast.launch.workers.output import say_early

        check_host(job.health, say_early)
        return Agent(job, OneHost).run()
    from outlast.launch.hosts.job.run_job import run_job

    return run_job(job, job.hosts)


app = typer.Typer(
    name="outlast",
    help="PyTorch training jobs that outlast their faults.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Everything after the script belongs to the script. Names are accepted with dashes and with
# underscores, as with torchrun.
app.command(
    "run",
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)(with_options_of(RunOptions, run))
for command in (report.report, live.top, live.metrics, drain.drain):
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

"""`outlast run`: starts a script as a job of several processes, on one host or many."""

from __future__ import annotations

from typing import Any

import typer

from outlast.errors import HostUnfit, LaunchError
from outlast.launch import environment
from outlast.launch.commands.shared import UNFIT, exit_on, with_options_of
from outlast.launch.config.from_options import in_step, job_from_options
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.config.options import RunOptions


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    # Everything after the script belongs to the script. Names are accepted with dashes and with
    # underscores, as with torchrun.
    settings: dict[str, Any] = {
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
    app.command("run", context_settings=settings)(with_options_of(RunOptions, run))


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
    # Imported here: one host's store is torch's, whose import takes seconds.
    from outlast.launch.agent.agent import Agent

    if job.hosts is None:
        from outlast.launch.agent.one_host import OneHost
        from outlast.launch.health.host_check import check_host
        from outlast.launch.workers.output import say_early

        check_host(job.health, say_early)
        return Agent(job, OneHost).run()
    from outlast.launch.hosts.job.run_job import run_job

    return run_job(job, job.hosts)

"""`outlast top DIR`: shows a running job in the terminal, from its event logs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.errors import EventLogError
from outlast.launch.commands.error_exit import exit_on
from outlast.launch.commands.run_arguments import RunDirectory, RunName

if TYPE_CHECKING:
    from outlast.metrics.live_run import LiveRun


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("top")(top)


def top(
    directory: RunDirectory,
    run: RunName = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame. The default without a terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Time between frames.")
    ] = 1.0,
) -> None:
    """Show a running job: its ranks, its steps, the last fault, checkpoints, goodput. Ends with the
    job; q ends it before. It only reads, so that it has no effect on the job.
    """
    from rich.console import Console

    from outlast.events.run_folders import choose_run, runs_in
    from outlast.metrics.live_run import LiveRun
    from outlast.metrics.screen import Screen

    with exit_on(EventLogError, OSError):
        chosen = choose_run(runs_in(directory), run)
        live = LiveRun(chosen.folder)
        console = Console()
        if once or not console.is_terminal:
            live.poll()
            console.print(Screen(live).frame())
        else:
            _show(live, console, interval)


def _show(run: LiveRun, console: object, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from outlast.launch.output.keys import Keys
    from outlast.metrics.screen import Screen

    assert isinstance(console, Console)
    screen = Screen(run)
    run.poll()
    # Ctrl-C is an orderly end.
    with (
        contextlib.suppress(KeyboardInterrupt),
        Keys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not run.over():
            live.update(screen.frame(console.height), refresh=True)
            if keys.pressed(interval_s) in ("q", "Q"):
                return
            run.poll()
    console.print(screen.frame())

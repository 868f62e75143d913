"""`outlast top DIR` and `outlast metrics DIR`: show a running job in the terminal, or export its
metrics if its launcher does not. Both only read its event logs.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.errors import EventLogError
from outlast.launch.commands.shared import RunDirectory, RunName, exit_on

if TYPE_CHECKING:
    from rich.console import Console

    from outlast.metrics.live_run import LiveRun


def top(
    directory: RunDirectory,
    run: RunName = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame. The default without a terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time between frames.")
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


def _show(run: LiveRun, console: Console, interval_s: float) -> None:
    from rich.live import Live

    from outlast.metrics.screen import Screen

    screen = Screen(run)
    run.poll()
    # Ctrl-C is an orderly end.
    with (
        contextlib.suppress(KeyboardInterrupt),
        pressed_keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not run.over():
            live.update(screen.frame(console.height), refresh=True)
            if pressed(interval_s) in ("q", "Q"):
                return
            run.poll()
    console.print(screen.frame())


@contextlib.contextmanager
def pressed_keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits so many seconds for a key, without Enter; empty without one."""
    descriptor, before = -1, []
    with contextlib.suppress(AttributeError, ValueError, OSError, termios.error):
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        tty.setcbreak(terminal)
        descriptor = terminal
    gone = descriptor < 0

    def pressed(timeout_s: float) -> str:
        nonlocal gone
        if gone:
            time.sleep(timeout_s)
            return ""
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return ""
        data = os.read(descriptor, 64)
        gone = not data
        return data.decode(errors="replace")[:1]

    try:
        yield pressed
    finally:
        if descriptor >= 0:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def metrics(
    directory: RunDirectory,
    run: RunName = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve them for Prometheus at this port; 0 for a free one.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address of that port.")
    ] = "127.0.0.1",
    opentelemetry: Annotated[
        bool,
        typer.Option(
            "--opentelemetry",
            help="Send metrics and traces by OTLP, as the OTEL_* environment variables say.",
        ),
    ] = False,
) -> None:
    """Export the metrics of all hosts of a run, until SIGINT or SIGTERM: for jobs under another
    launcher. `outlast run --metrics-port` does the same for each host.
    """
    from outlast.events.run_folders import choose_run, runs_in
    from outlast.launch.config.from_options import require_exporters
    from outlast.metrics.main import Order, export, listen, url

    if port is None and not opentelemetry:
        raise typer.BadParameter("give --port or --opentelemetry: there is nothing to export to")
    try:
        require_exporters("--port", port, opentelemetry)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    over = threading.Event()
    with exit_on(EventLogError, OSError):
        chosen = choose_run(runs_in(directory), run)
        name = chosen.folder.absolute().name
        order = Order(folder=str(chosen.folder), run=name, host=None, opentelemetry=opentelemetry)
        listening = None if port is None else listen(host, port)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: over.set())
        if listening is not None:
            typer.echo(f"metrics of {name}: {url(listening)}")
        export(order, listening, over, live=None)

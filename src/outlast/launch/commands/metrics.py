"""`outlast metrics DIR`: exports the metrics of a run that its launcher does not export."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from outlast.errors import EventLogError
from outlast.launch.commands.shared import RunDirectory, RunName, exit_on


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
    from outlast.metrics.main import Order, export
    from outlast.metrics.prometheus import listen, url

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

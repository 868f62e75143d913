"""`outlast report DIR`: prints the report of a run from its event logs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.errors import EventLogError
from outlast.launch.commands.shared import RunDirectory, RunName, exit_on

if TYPE_CHECKING:
    from outlast.events.report import Report
    from outlast.events.run_folders import Run

_NAMED = 5  # the newest other runs are listed; the rest is counted


def report(
    directory: RunDirectory,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the report as one HTML page, which needs no other file."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the timeline as a trace, for ui.perfetto.dev."),
    ] = None,
    run: RunName = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every run in DIR, the oldest first.")
    ] = False,
) -> None:
    """Print what happened in a run: each fault, its cause, and how long the recovery took."""
    from outlast.events.run_folders import choose_run, runs_in

    if every and run is not None:
        raise typer.BadParameter("--run and --all do not go together")
    for option, file in (("--html", html), ("--trace", trace)):
        if file is not None and (every or as_json):
            raise typer.BadParameter(
                f"{option} is of one run, and does not go together with --all or --json"
            )
    with exit_on(EventLogError):
        runs = runs_in(directory)
        if every:
            _print_all(runs, as_json)
        else:
            chosen = choose_run(runs, run)
            if html is not None or trace is not None:
                _write_files(chosen, html, trace)
            else:
                _print_one(chosen, as_json)
            _list_others(chosen, runs, directory, as_json)


def _report_of(run: Run) -> Report:
    from outlast.events.report import build
    from outlast.events.run_folders import events_of

    report = build(events_of(run))  # another launcher than ours records no ID
    return dataclasses.replace(report, run_id=report.run_id or run.run_id)


def _print_one(run: Run, as_json: bool) -> None:
    from rich.console import Console

    from outlast.events.report import render_report, to_json

    report = _report_of(run)
    if as_json:
        typer.echo(to_json(report))
    else:
        render_report(report, Console())


def _write_files(run: Run, html: Path | None, trace: Path | None) -> None:
    from outlast.events.report import render_html, to_trace

    report = _report_of(run)
    if html is not None:
        started = "" if run.own else f"started {run.at:%Y-%m-%d %H:%M:%S} UTC"
        title = run.run_id or run.folder.resolve().name
        _write("--html", html, render_html(report, title=title, started=started))
    if trace is not None:
        _write("--trace", trace, to_trace(report))


def _write(option: str, file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EventLogError(f"{option} {file}: cannot be written: {error.strerror}") from error
    typer.echo(_printable(f"wrote {file}"))


def _print_all(runs: Sequence[Run], as_json: bool) -> None:
    if as_json:
        from outlast.events.report import to_json

        reports = [
            {"run": run.name, "report": json.loads(to_json(_report_of(run)))} for run in runs
        ]
        typer.echo(json.dumps(reports, indent=2))
        return
    for number, run in enumerate(runs):
        if number:
            typer.echo()
        typer.echo(_printable(f"{_title(run)}:"))
        _print_one(run, as_json)


def _list_others(chosen: Run, runs: Sequence[Run], directory: Path, as_json: bool) -> None:
    """Names the run, and lists the others: the user may have meant one of those."""
    from outlast.events.spool import BESIDE, is_alive

    others = [run for run in runs if run is not chosen]
    count = f"{len(others)} other{'s' if len(others) > 1 else ''}"
    taken = _title(chosen) + (", which is running" if is_alive(chosen.folder) else "")
    lines = [f"{taken}; {count} in {directory}, shown by --run NAME or --all:"]
    if not others:
        lines = [f"{taken}, in {directory}."] if chosen.folder.parent.name == BESIDE else []
    newest_first = others[: -_NAMED - 1 : -1]
    lines += [f"  {run.name}" + (" (the logs in it)" if run.own else "") for run in newest_first]
    if len(others) > _NAMED:
        lines.append(f"  ... and {len(others) - _NAMED} older")
    for line in lines:
        typer.echo(_printable(line), err=as_json)  # with --json, stdout has only JSON


def _title(run: Run) -> str:
    return f"The logs in {run.folder} itself" if run.own else f"Run {run.name}"


def _printable(text: str) -> str:
    # A run id may contain any character that a folder name may.
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)

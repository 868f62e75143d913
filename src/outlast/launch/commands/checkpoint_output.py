"""The output of `outlast checkpoint`: the table, the JSON objects, the progress bar."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from outlast.system.units import age_text, size_text

if TYPE_CHECKING:
    from outlast.async_checkpoint.inspection import Found


def as_json(found: Found) -> dict[str, object]:
    """A folder as a JSON object."""
    known: dict[str, object] = {}
    manifest = found.manifest
    if manifest is not None:
        known = {
            "size_bytes": manifest.size_bytes,
            "world_size": manifest.world_size,
            "metric": manifest.metric,
            "tensors": len(manifest.tensors),
        }
    return {
        "step": found.step,
        "folder": found.folder,
        "saved_at": _iso(found.saved_at),
        **known,
        # "not committed", "removed", "recycled files", "replaced": without the explanation
        "state": found.wrong.partition(",")[0] if found.step is None else _state(found),
        "wrong": "" if found.step is None else found.wrong,
    }


def print_table(found: Sequence[Found], now: float) -> None:
    """Print a row for each checkpoint, and a line for each folder that is none or is damaged.
    `now` is the time since 1970. See `as_json`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("step", "age", "size", "ranks", "metric", "tensors"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    # Below the table, where they have the whole width.
    remarks: list[str] = []
    for one in found:
        if one.step is None:
            remarks.append(f"{one.wrong}: {one.folder}")
            continue
        about = ["-"] * 4
        if one.manifest is not None:
            metric = one.manifest.metric
            about = [
                size_text(one.manifest.size_bytes),
                str(one.manifest.world_size),
                "-" if metric is None else f"{metric:g}",
                str(len(one.manifest.tensors)),
            ]
        if one.wrong:
            remarks.append(f"{_state(one)}: step {one.step}: {one.wrong}")
        state = Text(_state(one), style="red" if one.wrong else "green")
        age = "-" if one.saved_at is None else age_text(now - one.saved_at)
        table.add_row(str(one.step), age, *about, state)
    # Into a pipe, print full lines rather than lines cut to the width of a missing terminal.
    console = Console(width=None if sys.stdout.isatty() else 500)
    if table.row_count:
        console.print(table)
    for remark in remarks:
        console.print(Text(remark), soft_wrap=True)


def _state(found: Found) -> str:
    if found.unread:
        return "unreadable"
    return "damaged" if found.wrong else "whole"


def print_verified(name: str, size_bytes: int) -> None:
    """Report a checkpoint without damage."""
    typer.echo(f"{name}: every byte is as it was written, {size_text(size_bytes)}")


@contextmanager
def progress_bar(size_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error if that is a terminal; yields the function to advance it."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done_bytes: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=False), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=size_bytes)
        yield lambda done_bytes: progress.advance(task, done_bytes)


def _iso(time: float | None) -> str | None:
    """A time since 1970 in UTC, e.g. `2026-11-22T11:36:19+00:00`."""
    if time is None:
        return None
    utc = datetime.datetime.fromtimestamp(time, datetime.timezone.utc)
    return utc.isoformat(timespec="seconds")

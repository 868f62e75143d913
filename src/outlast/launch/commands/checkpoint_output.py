"""What `outlast checkpoint` prints: the table, the JSON objects, the progress bar."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from outlast.async_checkpoint.storage.directory import Found

__all__ = [
    "as_json",
    "print_rows",
    "print_table",
    "print_verified",
    "progress_bar",
    "size_text",
]


def as_json(found: Found) -> dict[str, object]:
    """A folder as a JSON object."""
    known = dataclasses.asdict(found.info) if found.info is not None else {}
    state = "damaged" if found.wrong else "whole"
    return {
        **known,
        "step": found.step,
        "folder": found.folder,
        "state": found.wrong if found.step is None else state,  # "not committed", "replaced"
        "wrong": "" if found.step is None else found.wrong,
    }


def print_table(found: Sequence[Found]) -> None:
    """Print a row for each folder."""
    rows = []
    for one in found:
        about = ["-"] * 4
        if one.info is not None:
            metric = "-" if one.info.metric is None else f"{one.info.metric:g}"
            size = size_text(one.info.size_bytes)
            about = [size, str(one.info.world_size), metric, str(one.info.tensors)]
        rows.append((one.step, about, one.wrong, one.folder))
    print_rows(["step", "size", "world size", "metric", "tensors"], rows)


def print_rows(
    titles: Sequence[str], rows: Sequence[tuple[int | None, Sequence[str], str, str]]
) -> None:
    """Print a table with a last column "state".

    Args:
        titles: of the other columns.
        rows: number of the checkpoint (`None` if it is not one), the other columns, what is wrong
            with it (empty if nothing is), and its folder.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for number, about, wrong, folder in rows:
        if number is None:
            state = Text(f"{wrong}: {folder}", style="dim")
        elif wrong:
            state = Text(f"damaged: {wrong}", style="red")
        else:
            state = Text("whole", style="green")
        table.add_row("-" if number is None else str(number), *about, state)
    # Into a pipe, print full lines rather than lines cut to the width of a missing terminal.
    Console(width=None if sys.stdout.isatty() else 500).print(table)


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


def size_text(size_bytes: int) -> str:
    """A size with its unit, e.g. `25.2 MB`."""
    from rich.filesize import decimal

    return decimal(size_bytes)

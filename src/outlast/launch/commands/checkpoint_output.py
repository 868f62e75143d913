"""The output of `outlast checkpoint`: the table, the JSON objects, the progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from outlast.async_checkpoint.named_files import Found


def as_json(found: Found, prefix: str) -> dict[str, object]:
    """A folder as a JSON object; `prefix` is the kind of checkpoint, `step` or `states`."""
    of_states = prefix == "states"
    known: dict[str, object] = {}
    manifest = found.manifest
    if manifest is not None:
        known = {"size_bytes": manifest.size_bytes, "world_size": manifest.world_size}
        if of_states:
            known["states"] = len(manifest.files)
        else:
            known |= {"metric": manifest.metric, "tensors": len(manifest.tensors)}
    state = "damaged" if found.wrong else "whole"
    return {
        **({"step": None, "number": found.step} if of_states else {"step": found.step}),
        "folder": found.folder,
        **known,
        "state": found.wrong if found.step is None else state,  # "not committed", "replaced"
        "wrong": "" if found.step is None else found.wrong,
    }


def print_table(found: Sequence[Found], prefix: str) -> None:
    """Print a row for each folder. See `as_json`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    of_states = prefix == "states"
    titles = ["number", "states"] if of_states else ["step", "metric", "tensors"]
    titles[1:1] = ["size", "world size"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for one in found:
        about = ["-"] * (len(titles) - 1)
        if one.manifest is not None:
            about = [_size_text(one.manifest.size_bytes), str(one.manifest.world_size)]
            if of_states:
                about.append(str(len(one.manifest.files)))
            else:
                metric = one.manifest.metric
                about += ["-" if metric is None else f"{metric:g}", str(len(one.manifest.tensors))]
        if one.step is None:
            state = Text(f"{one.wrong}: {one.folder}", style="dim")
        elif one.wrong:
            state = Text(f"damaged: {one.wrong}", style="red")
        else:
            state = Text("whole", style="green")
        table.add_row("-" if one.step is None else str(one.step), *about, state)
    # Into a pipe, print full lines rather than lines cut to the width of a missing terminal.
    Console(width=None if sys.stdout.isatty() else 500).print(table)


def print_verified(name: str, size_bytes: int) -> None:
    """Report a checkpoint without damage."""
    typer.echo(f"{name}: every byte is as it was written, {_size_text(size_bytes)}")


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


def _size_text(size_bytes: int) -> str:
    """A size with its unit, e.g. `25.2 MB`."""
    from rich.filesize import decimal

    return decimal(size_bytes)

"""`outlast checkpoint`: lists, verifies and deletes the checkpoints in a folder, and exports and
compares them (`checkpoint_contents.py`). None of this needs the job that saved them.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.errors import CheckpointError, CheckpointReadError
from outlast.launch.commands.checkpoint_contents import diff, export
from outlast.launch.commands.checkpoint_folder import (
    Directory,
    open_folder,
    progress_bar,
    refuse_unrelated_folder,
)
from outlast.launch.commands.shared import UNREAD
from outlast.system.units import age_text, size_text

if TYPE_CHECKING:
    from outlast.async_checkpoint.inspection import Found


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(
        help="List, verify, delete, export and compare checkpoints, without the job.",
        no_args_is_help=True,
    )
    group.command("ls")(ls)
    group.command("verify")(verify)
    group.command("rm")(rm)
    group.command("export")(export)
    group.command("diff")(diff)
    app.add_typer(group, name="checkpoint")


def ls(
    directory: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the checkpoints, damaged and unfinished ones included.

    Only the sizes of the files are checked; `verify` reads their contents. The exit code is 74 if
    one of them cannot be read now.
    """
    from outlast.async_checkpoint import inspection

    with open_folder(directory) as storage:
        found = inspection.survey(storage)
        if not found:
            refuse_unrelated_folder(storage)
        if as_json:
            typer.echo(json.dumps([_as_json(one) for one in found], indent=2))
        elif found:
            _print_table(found, time.time())
        else:
            typer.echo(f"no checkpoints in {storage.where}")
        if any(one.unread for one in found):
            raise typer.Exit(UNREAD)


def verify(
    directory: Directory,
    steps: Annotated[
        list[int] | None, typer.Argument(metavar="[STEP]...", help="Which ones. Default: all.")
    ] = None,
) -> None:
    """Read checkpoints completely and compare every byte with its checksum.

    The exit code is 1 if a checkpoint is damaged or none exists, and else 74 if one cannot be read
    now.
    """
    from outlast.async_checkpoint import inspection

    with open_folder(directory) as storage:
        known = {one.step: one for one in inspection.survey(storage) if one.step is not None}
        if not known and not steps:
            refuse_unrelated_folder(storage)
            raise CheckpointError(f"{storage.where} has no checkpoints")
        wanted = list(dict.fromkeys(steps)) if steps else list(known)
        # A checkpoint without a manifest has no list of files; `verify` reports it.
        sizes = {s: one.manifest.size_bytes for s, one in known.items() if one.manifest is not None}
        damaged = unread = False
        with progress_bar(sum(sizes.get(step, 0) for step in wanted)) as advance:
            for step in wanted:
                try:
                    info = inspection.verify(storage, step, advance)
                except CheckpointError as e:
                    unread |= isinstance(e, CheckpointReadError)
                    damaged |= not isinstance(e, CheckpointReadError)
                    typer.echo(f"outlast: error: step {step}: {e}", err=True)
                else:
                    whole = f"every byte is as it was written, {size_text(info.size_bytes)}"
                    typer.echo(f"step {step}: {whole}")
    if damaged or unread:
        raise typer.Exit(1 if damaged else UNREAD)


def rm(
    directory: Directory,
    steps: Annotated[list[int], typer.Argument(metavar="STEP...", help="Which ones.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete the last valid checkpoint too.")
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Delete even if a job on another machine may still be using DIR. Object stores "
            "only.",
        ),
    ] = False,
) -> None:
    """Delete checkpoints. Refused while a job is using the folder."""
    from outlast.async_checkpoint import inspection

    with open_folder(directory) as storage:
        chosen = list(dict.fromkeys(steps))
        found = {one.step for one in inspection.survey(storage) if one.step is not None}
        missing = [step for step in chosen if step not in found]
        if missing:
            raise CheckpointError(
                f"{storage.where} has no checkpoint of {_steps(missing)}; it has {sorted(found)}"
            )
        storage.lock(
            f"outlast checkpoint rm, process {os.getpid()} on {socket.gethostname()}",
            careful=not take_over,
        )
        try:
            # Checked with the lock held: before that, a job may have changed the folder.
            surveyed = inspection.survey(storage)
            valid = {one.step for one in surveyed if one.step is not None and not one.wrong}
            # One that cannot be read now may be the last valid one.
            kept = {one.step for one in surveyed if one.step is not None and one.unread} | valid
            if kept & set(chosen) and not valid - set(chosen) and not force:
                raise CheckpointError(
                    f"{_steps(sorted(kept & set(chosen)))}: no valid checkpoint would be left, so "
                    "nothing was deleted; use --force to delete it"
                )
            if not yes and not _confirmed(f"Delete {_steps(chosen)} from {storage.where}?"):
                raise CheckpointError("nothing was deleted")
            for step in chosen:
                inspection.delete(storage, step)
                typer.echo(f"deleted step {step}")
        finally:
            storage.unlock()


def _confirmed(question: str) -> bool:
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:  # end of input, or Ctrl-C
        typer.echo(err=True)
        return False


def _steps(steps: list[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def _as_json(found: Found) -> dict[str, object]:
    known: dict[str, object] = {}
    manifest = found.manifest
    if manifest is not None:
        known = {
            "size_bytes": manifest.size_bytes,
            "world_size": manifest.world_size,
            "metric": manifest.metric,
            "tensors": len(manifest.tensors),
        }
    at, zone = found.saved_at, datetime.timezone.utc
    utc = None if at is None else datetime.datetime.fromtimestamp(at, zone)
    return {
        "step": found.step,
        "folder": found.folder,
        "saved_at": utc and utc.isoformat(timespec="seconds"),  # as 2026-11-22T11:36:19+00:00
        **known,
        # "not committed", "removed", "recycled files", "replaced": without the explanation
        "state": found.wrong.partition(",")[0] if found.step is None else _state(found),
        "wrong": "" if found.step is None else found.wrong,
    }


def _print_table(found: Sequence[Found], now: float) -> None:
    """A row for each checkpoint, and a line for each folder that is none or damaged."""
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

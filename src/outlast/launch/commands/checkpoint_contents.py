"""`outlast checkpoint export` and `diff`: what is in a checkpoint, and how two of them differ."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outlast.errors import CheckpointError, CheckpointReadError
from outlast.launch.commands.checkpoint_folder import (
    Directory,
    open_folder,
    progress_bar,
    some_of,
    usable,
    warn,
)
from outlast.system.units import size_text

if TYPE_CHECKING:
    from outlast.async_checkpoint.difference import Difference
    from outlast.async_checkpoint.inspection import Found, Source, Storage

_DIFFERENT, _TROUBLE = 1, 2  # as `diff` has them


def export(
    directory: Directory,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Tensors: their names, a name above them, or a pattern. Default: all.",
        ),
    ] = None,
    format: Annotated[
        Literal["safetensors", "torch"] | None,
        typer.Option(help="Default: torch if FILE ends in .pt, .pth or .bin."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Default: the newest valid one.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: step-STEP.safetensors"),
    ] = None,
    root: Annotated[
        str, typer.Option(metavar="NAME", help="Export what is under NAME, named without it.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write the tensors of a checkpoint to one file, whole, whatever the number of ranks.

    A torch file has the nested state dict, for `torch.load(FILE, weights_only=True)`; a safetensors
    file has the tensors alone, by their flat names. Every byte that is read is verified. The exit
    code is 74 if the checkpoint cannot be read now.
    """
    from outlast.async_checkpoint import export as exports

    if format is None:
        torch_file = output and output.suffix in (".pt", ".pth", ".bin")
        format = "torch" if torch_file else "safetensors"
    with open_folder(directory) as storage:
        for found in usable(storage, step):
            file = output or Path(f"step-{found.step}{exports.SUFFIXES[format]}")
            if file.exists() and not force:
                raise CheckpointError(f"{file} exists; use --force to replace it")
            chosen = exports.select(_source(storage, found), root, names or [])
            try:
                with progress_bar(chosen.size_bytes) as advance:
                    left_out = exports.write(chosen, file, format, found.step or 0, advance)
            except CheckpointError as e:
                if step is not None or isinstance(e, CheckpointReadError):
                    raise
                warn(f"passed over step {found.step}: {e}")
                continue
            for why in dict.fromkeys(left_out.values()):
                names = [name for name, reason in left_out.items() if reason == why]
                warn(f"left out {some_of(names)}: {why}")
            count = f"{len(chosen.tensors)} tensor{'s' if len(chosen.tensors) > 1 else ''}"
            typer.echo(f"step {found.step}: {count}, {size_text(chosen.size_bytes)}, in {file}")
            return


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpointer's directory.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one, or the same.")],
    step_a: Annotated[int | None, typer.Option(help="Default: the newest valid one.")] = None,
    step_b: Annotated[int | None, typer.Option(help="Default: the newest valid one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Compare two checkpoints bit by bit, whatever the number of ranks that saved each.

    What has the same stored checksums in both is not read. The exit code is 0 if they are equal, 1
    if they differ, and 2 after an error.
    """
    from outlast.async_checkpoint.difference import compare

    with ExitStack() as stack:
        sources = []
        for directory, step in ((a, step_a), (b, step_b)):
            storage = stack.enter_context(open_folder(directory, _TROUBLE))
            sources.append(_source(storage, next(usable(storage, step))))
        found = compare(*sources)
        if as_json:
            where = {"a": sources[0].where, "b": sources[1].where, "different": bool(found)}
            typer.echo(json.dumps({**where, **dataclasses.asdict(found)}, indent=2))
        else:
            _print(found)
    if found:
        raise typer.Exit(_DIFFERENT)


def _source(storage: Storage, found: Found) -> Source:
    from outlast.async_checkpoint.inspection import storage_source

    assert found.manifest is not None  # `usable` has read it
    return storage_source(storage, found.folder, found.manifest)


def _print(found: Difference) -> None:
    """Print a row for each tensor that differs, and below it a line for each other difference."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")
    for title in ("differ", "of", "first at", "max abs", "max rel", "not finite"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found.tensors:
        maxima = ["-" if each is None else f"{each:.3g}" for each in (one.max_abs, one.max_rel)]
        cells = (one.differing, one.elements, one.first, *maxima, one.non_finite or "-")
        table.add_row(Text(one.name), *(Text(str(cell)) for cell in cells))
    console = Console(width=None if sys.stdout.isatty() else 500)
    if table.row_count:
        console.print(table)
    for title, names in (("only in A", found.only_in_a), ("only in B", found.only_in_b)):
        for name in names:
            typer.echo(f"{title}: {name}")
    for name, (left, right) in {**found.kinds, **found.values}.items():
        typer.echo(f"{name}: {left} in A, {right} in B")
    counts = {
        "different tensors": found.tensors,
        "different values": found.values,
        "of another type or shape": found.kinds,
        "only in A": found.only_in_a,
        "only in B": found.only_in_b,
    }
    parts = [f"{what}: {len(names)}" for what, names in counts.items() if names]
    typer.echo(", ".join([*parts, f"equal: {found.equal}"]))

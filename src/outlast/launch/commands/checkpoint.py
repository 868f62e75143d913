"""`outlast checkpoint`: what lies in a folder of checkpoints: listed, verified, deleted.

None of it needs torch, nor the job that saved them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from outlast.async_checkpoint.storage.directory import CheckpointInfo, Found
    from outlast.async_checkpoint.storage.protocol import Storage
    from outlast.elastic.states.stored import FoundStates

__all__ = ["register"]

_NAMED = 5  # of what a wrong folder holds

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="What was given to `Checkpointer`: a path or a URL.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(
        help="List, verify and delete checkpoints, without the job.", no_args_is_help=True
    )
    group.command("ls")(ls)
    group.command("verify")(verify)
    group.command("rm")(rm)
    app.add_typer(group, name="checkpoint")


def ls(
    directory: Directory,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON, for programs.")
    ] = False,
) -> None:
    """Print what is there, damaged and unfinished ones too.

    Of the files only the sizes are looked at; `verify` reads them.
    """
    with _clear_errors(), _open(directory) as storage:
        from outlast.async_checkpoint.storage.directory import survey

        states = _states_in(storage)
        of_states = {one.folder for one in states}
        found = [one for one in survey(storage) if one.folder not in of_states]
        if not found and not states:
            _refuse_another_folder(storage)
        if as_json:
            every = [_as_json(one) for one in found] + [_states_as_json(one) for one in states]
            typer.echo(json.dumps(every, indent=2))
        elif found or states:
            if found:
                _print_table(found)
            if states:
                _print_states(states)
        else:
            typer.echo(f"no checkpoints in {storage.where}")


def verify(
    directory: Directory,
    steps: Annotated[
        list[int] | None, typer.Argument(metavar="[STEP]...", help="Which ones; all by default.")
    ] = None,
) -> None:
    """Read checkpoints whole, and compare every byte with its checksum. Exit code 1 if any is
    damaged, or there is none.
    """
    with _clear_errors(), _open(directory) as storage:
        from outlast.async_checkpoint.storage import directory as folders
        from outlast.errors import CheckpointError

        # The files of those without a manifest are not known; `verify` says so.
        known = {one.step: one for one in folders.survey(storage) if one.step is not None}
        if not known and _verify_states(storage, steps or []):
            return
        if not known and not steps:
            _refuse_another_folder(storage)
            raise CheckpointError(f"{storage.where} has no checkpoints")
        wanted = list(dict.fromkeys(steps)) if steps else list(known)
        sizes = {s: one.info.size_bytes for s, one in known.items() if one.info is not None}
        damaged = False
        with _progress(sum(sizes.get(step, 0) for step in wanted)) as advance:
            for step in wanted:
                try:
                    info = folders.verify(storage, step, advance)
                except CheckpointError as e:
                    damaged = True
                    typer.echo(f"outlast: error: step {step}: {e}", err=True)
                else:
                    typer.echo(f"step {step}: every byte is as it was written, {_size(info)}")
    if damaged:
        raise typer.Exit(1)


def rm(
    directory: Directory,
    steps: Annotated[list[int], typer.Argument(metavar="STEP...", help="Which ones.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also if no valid checkpoint is left then.")
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Also where a job on another machine has used DIR last, and did not say that it "
            "has ended. Object stores only.",
        ),
    ] = False,
) -> None:
    """Delete checkpoints. Not while a job is using the folder."""
    with _clear_errors(), _open(directory) as storage:
        from outlast.async_checkpoint.storage import directory as folders
        from outlast.errors import CheckpointError

        chosen = list(dict.fromkeys(steps))
        found = {one.step: one for one in folders.survey(storage) if one.step is not None}
        missing = [step for step in chosen if step not in found]
        if missing and not found and _states_in(storage):
            raise CheckpointError(
                f"{storage.where} holds checkpoints of states, and every save_all_states() removes "
                "those before its own: to begin anew, remove the folder"
            )
        if missing:
            raise CheckpointError(
                f"{storage.where} has no checkpoint of {_steps(missing)}; it has {sorted(found)}"
            )
        storage.lock(
            f"outlast checkpoint rm, process {os.getpid()} on {socket.gethostname()}",
            careful=not take_over,
        )
        try:
            # Looked at again: until now a job might have been at work here.
            valid = {s.step for s in folders.survey(storage) if s.step is not None and not s.wrong}
            if valid & set(chosen) and not valid - set(chosen) and not force:
                raise CheckpointError(
                    f"{_steps(sorted(valid))} would be the last valid checkpoint to go: nothing "
                    "was deleted; --force deletes it"
                )
            if not yes and not _agrees(f"Delete {_steps(chosen)} from {storage.where}?"):
                raise CheckpointError("nothing was deleted")
            for step in chosen:
                folders.delete(storage, step)
                typer.echo(f"deleted step {step}")
        finally:
            storage.unlock()


@contextmanager
def _clear_errors() -> Iterator[None]:
    from outlast.errors import CheckpointError

    try:
        yield
    except (CheckpointError, OSError, ModuleNotFoundError, ValueError) as e:
        typer.echo(f"outlast: error: {e}", err=True)
        raise typer.Exit(1) from e


def _open(directory: str) -> closing[Storage]:
    from outlast.async_checkpoint.storage.protocol import open_storage
    from outlast.errors import CheckpointError

    path = directory.removeprefix("file://")
    if "://" not in path and not Path(path).expanduser().is_dir():
        why = "" if Path(path).expanduser().exists() else "there is nothing of that name; "
        raise CheckpointError(f"{path} is no folder: {why}give the folder that the job saves into")
    return closing(open_storage(directory))


def _refuse_another_folder(storage: Storage) -> None:
    """An empty folder may be one of checkpoints; one that holds other things was named by mistake.

    Raises:
        CheckpointError: saying what it is, and what to give instead.
    """
    from outlast.async_checkpoint.storage.local import LocalStorage
    from outlast.async_checkpoint.storage.manifest import MANIFEST
    from outlast.errors import CheckpointError

    if not isinstance(storage, LocalStorage):
        return
    if (storage.root / MANIFEST).is_file():
        raise CheckpointError(
            f"{storage.where} is one checkpoint: give the folder it lies in, {storage.root.parent}"
        )
    # What is hidden may be a checkpointer's: its lock, say.
    held = sorted(path.name for path in storage.root.iterdir() if not path.name.startswith("."))
    if held:
        more = f", ... ({len(held)} in all)" if len(held) > _NAMED else ""
        raise CheckpointError(
            f"{storage.where} holds no checkpoints, but {', '.join(held[:_NAMED])}{more}: give the "
            "folder that was given to `Job` or `Checkpointer`, or is OUTLAST_CHECKPOINT_PATH"
        )


def _states_in(storage: Storage) -> list[FoundStates]:
    from outlast.async_checkpoint.storage.local import LocalStorage
    from outlast.elastic.states import stored

    return stored.survey(storage) if isinstance(storage, LocalStorage) else []


def _verify_states(storage: Storage, numbers: Sequence[int]) -> bool:
    """As `verify`; whether there are checkpoints of states.

    Raises:
        CheckpointError: if a number is asked for that is not there.
        typer.Exit: with 1, if any is damaged.
    """
    from outlast.async_checkpoint.storage.local import LocalStorage
    from outlast.elastic.states import stored
    from outlast.errors import CheckpointError

    known = {one.number: one.folder for one in _states_in(storage) if one.number is not None}
    if not known or not isinstance(storage, LocalStorage):
        return False
    missing = [number for number in numbers if number not in known]
    if missing:
        raise CheckpointError(
            f"{storage.where} has no checkpoint of states {missing[0]}; it has {sorted(known)}"
        )
    damaged = False
    for number in numbers or known:
        try:
            chosen = stored.choose_one(storage, known[number])
        except CheckpointError as e:
            damaged = True
            typer.echo(f"outlast: error: states {number}: {e}", err=True)
        else:
            size = _decimal(chosen.manifest.size_bytes if chosen is not None else 0)
            typer.echo(f"states {number}: every byte is as it was written, {size}")
    if damaged:
        raise typer.Exit(1)
    return True


def _agrees(question: str) -> bool:
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:  # the end of the input, or Ctrl-C
        typer.echo(err=True)
        return False


def _as_json(found: Found) -> dict[str, object]:
    known = dataclasses.asdict(found.info) if found.info is not None else {}
    return {
        **known,
        "step": found.step,
        "folder": found.folder,
        "state": _state(found),
        "wrong": found.wrong if found.step is not None else "",
    }


def _state(found: Found) -> str:
    if found.step is None:
        return found.wrong  # "not committed", "replaced"
    return "damaged" if found.wrong else "whole"


def _print_table(found: Sequence[Found]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("step", "size", "world size", "metric", "tensors"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for one in found:
        info = one.info
        about = ["-"] * 4
        if info is not None:
            metric = "-" if info.metric is None else f"{info.metric:g}"
            about = [_size(info), str(info.world_size), metric, str(info.tensors)]
        state = _state(one)
        if one.step is None:
            text = Text(f"{state}: {one.folder}", style="dim")
        elif one.wrong:
            text = Text(f"damaged: {one.wrong}", style="red")
        else:
            text = Text(state, style="green")
        table.add_row("-" if one.step is None else str(one.step), *about, text)
    _print(table)


def _print_states(found: Sequence[FoundStates]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("number", "size", "world size", "states"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for one in found:
        manifest = one.manifest
        about = ["-"] * 3
        if manifest is not None:
            size = _decimal(manifest.size_bytes)
            about = [size, str(manifest.world_size), str(len(manifest.files))]
        if one.number is None:
            text = Text(f"{one.wrong}: {one.folder}", style="dim")
        elif one.wrong:
            text = Text(f"damaged: {one.wrong}", style="red")
        else:
            text = Text("whole", style="green")
        table.add_row("-" if one.number is None else str(one.number), *about, text)
    _print(table)


def _states_as_json(one: FoundStates) -> dict[str, object]:
    known: dict[str, object] = {}
    if one.manifest is not None:
        known = {
            "size_bytes": one.manifest.size_bytes,
            "world_size": one.manifest.world_size,
            "states": len(one.manifest.files),
        }
    state = "damaged" if one.wrong else "whole"
    return {
        "step": None,
        "number": one.number,
        "folder": one.folder,
        **known,
        "state": one.wrong if one.number is None else state,
        "wrong": one.wrong if one.number is not None else "",
    }


def _print(table: Table) -> None:
    from rich.console import Console

    # In a pipe nothing is cut to the width of a terminal that is not there.
    Console(width=None if sys.stdout.isatty() else 500).print(table)


@contextmanager
def _progress(size_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar for a person who waits, on standard error; yields what moves it on."""
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


def _size(info: CheckpointInfo) -> str:
    return _decimal(info.size_bytes)


def _decimal(size_bytes: int) -> str:
    from rich.filesize import decimal

    return decimal(size_bytes)


def _steps(steps: Sequence[int | None]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"

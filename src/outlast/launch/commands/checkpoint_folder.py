"""The folder that a command of `outlast checkpoint` is given, and which checkpoint in it to use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.errors import CheckpointError, CheckpointReadError
from outlast.launch.commands.shared import exit_on

if TYPE_CHECKING:
    from outlast.async_checkpoint.inspection import Found, Storage

_ERRORS = (CheckpointError, OSError, ModuleNotFoundError, ValueError)
_NAMED = 5  # in a message

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="The checkpointer's directory: a path or a URL.")
]


@contextmanager
def open_folder(directory: str, code: int | None = None) -> Iterator[Storage]:
    """The folder's storage; an error within the block ends the command, see `exit_on`."""
    from outlast.async_checkpoint.inspection import open_storage

    path = directory.removeprefix("file://")
    with exit_on(*_ERRORS, code=code):
        if "://" not in path and not Path(path).expanduser().is_dir():
            why = "" if Path(path).expanduser().exists() else "it does not exist; "
            raise CheckpointError(
                f"{path} is not a folder: {why}give the folder the job saves into"
            )
        with closing(open_storage(directory)) as storage:
            yield storage


def refuse_unrelated_folder(storage: Storage) -> None:
    """Accepts an empty folder; one with other contents was probably named by mistake."""
    from outlast.async_checkpoint.inspection import MANIFEST, LocalStorage

    if not isinstance(storage, LocalStorage):
        return
    if (storage.root / MANIFEST).is_file():
        raise CheckpointError(
            f"{storage.where} is a single checkpoint: give its parent, {storage.root.parent}"
        )
    # Hidden files are ignored: a checkpointer's own (its lock, for example) are hidden.
    held = sorted(path.name for path in storage.root.iterdir() if not path.name.startswith("."))
    if held:
        raise CheckpointError(
            f"{storage.where} holds no checkpoints, but {some_of(held)}: give the folder that was "
            "given to `Job` or `Checkpointer`, or the folder `states` in OUTLAST_CHECKPOINT_PATH"
        )


def usable(storage: Storage, step: int | None) -> Iterator[Found]:
    """The checkpoint of `step`; by default all with an intact manifest and files of the right size,
    the newest first. Warns about those that are passed over. A `CheckpointError` if there is none,
    or that of `step` is damaged; a `CheckpointReadError` if the next one cannot be read now.
    """
    from outlast.async_checkpoint import inspection

    found = [one for one in inspection.survey(storage) if one.step is not None]
    if not found:
        refuse_unrelated_folder(storage)
        raise CheckpointError(f"{storage.where} has no checkpoints")
    known = [one.step for one in found]
    if step is not None and step not in known:
        raise CheckpointError(f"{storage.where} has no checkpoint of step {step}; it has {known}")
    for one in reversed(found):
        if step is not None and one.step != step:
            continue
        if one.unread or (one.wrong and step is not None):
            kind = CheckpointReadError if one.unread else CheckpointError
            raise kind(f"step {one.step} of {storage.where}: {one.wrong}")
        if one.wrong:
            warn(f"passed over step {one.step}: {one.wrong}")
        else:
            yield one
    raise CheckpointError(f"no checkpoint in {storage.where} is valid")


def some_of(names: Sequence[str]) -> str:
    """The first names, and how many there are."""
    more = f", ... ({len(names)} in all)" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def warn(text: str) -> None:
    """Prints one line on standard error."""
    typer.echo(f"outlast: warning: {text}", err=True)


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

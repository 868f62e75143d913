"""`outlast checkpoint`: lists, verifies and deletes the checkpoints in a folder.

Needs neither torch nor the job that saved them.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.errors import CheckpointError, CheckpointReadError
from outlast.launch.commands import checkpoint_output as output
from outlast.launch.commands.shared import UNREAD, exit_on

if TYPE_CHECKING:
    from outlast.async_checkpoint.named_files import Storage

_ERRORS = (CheckpointError, OSError, ModuleNotFoundError, ValueError)
_NAMED = 5  # files named in the error about a folder with other contents

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="The checkpointer's directory: a path or a URL.")
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """List the checkpoints, damaged and unfinished ones included.

    Only the sizes of the files are checked; `verify` reads their contents. The exit code is 74 if
    one of them cannot be read now.
    """
    with exit_on(*_ERRORS), ExitStack() as stack:
        from outlast.async_checkpoint import named_files

        kinds = _open_kinds(directory, stack)
        found = {storage.prefix: named_files.survey(storage) for storage in kinds}
        if not any(found.values()):
            _refuse_unrelated_folder(kinds[0])
        if as_json:
            rows = [output.as_json(one, prefix) for prefix in found for one in found[prefix]]
            typer.echo(json.dumps(rows, indent=2))
        for prefix, folders in found.items():
            if folders and not as_json:
                output.print_table(folders, prefix, time.time())
        if not any(found.values()) and not as_json:
            typer.echo(f"no checkpoints in {kinds[0].where}")
        if any(one.unread for folders in found.values() for one in folders):
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
    with exit_on(*_ERRORS), ExitStack() as stack:
        from outlast.async_checkpoint import named_files

        storage, states = _open_kinds(directory, stack)
        known = {one.step: one for one in named_files.survey(storage) if one.step is not None}
        of_states = {one.step: one for one in named_files.survey(states) if one.step is not None}
        if of_states and not known:
            storage, known = states, of_states
        if not known and not steps:
            _refuse_unrelated_folder(storage)
            raise CheckpointError(f"{storage.where} has no checkpoints")
        wanted = list(dict.fromkeys(steps)) if steps else list(known)
        # A checkpoint without a manifest has no list of files; `verify` reports it.
        sizes = {s: one.manifest.size_bytes for s, one in known.items() if one.manifest is not None}
        damaged = unread = False
        with output.progress_bar(sum(sizes.get(step, 0) for step in wanted)) as advance:
            for step in wanted:
                try:
                    info = named_files.verify(storage, step, advance)
                except CheckpointError as e:
                    unread |= isinstance(e, CheckpointReadError)
                    damaged |= not isinstance(e, CheckpointReadError)
                    typer.echo(f"outlast: error: {storage.prefix} {step}: {e}", err=True)
                else:
                    output.print_verified(f"{storage.prefix} {step}", info.size_bytes)
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
    with exit_on(*_ERRORS), ExitStack() as stack:
        from outlast.async_checkpoint import named_files

        storage, states = _open_kinds(directory, stack)
        chosen = list(dict.fromkeys(steps))
        found = {one.step for one in named_files.survey(storage) if one.step is not None}
        missing = [step for step in chosen if step not in found]
        if missing and not found and named_files.survey(states):
            raise CheckpointError(
                f"{storage.where} holds checkpoints of states; every save_all_states() removes the "
                "earlier ones, so there is nothing to delete: to start anew, remove the folder"
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
            # Checked with the lock held: before that, a job may have changed the folder.
            surveyed = named_files.survey(storage)
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
                named_files.delete(storage, step)
                typer.echo(f"deleted step {step}")
        finally:
            storage.unlock()


def _open_kinds(directory: str, stack: ExitStack) -> list[Storage]:
    """The storage for each kind of checkpoint: those of a checkpointer, and those of elastic states
    (`save_all_states`), which may be in the same folder. `stack` closes them.
    """
    from outlast.async_checkpoint.named_files import STATES, STEP, open_storage

    path = directory.removeprefix("file://")
    if "://" not in path and not Path(path).expanduser().is_dir():
        why = "" if Path(path).expanduser().exists() else "it does not exist; "
        raise CheckpointError(f"{path} is not a folder: {why}give the folder the job saves into")
    return [
        stack.enter_context(closing(open_storage(directory, prefix))) for prefix in (STEP, STATES)
    ]


def _refuse_unrelated_folder(storage: Storage) -> None:
    """Accepts an empty folder; one with other contents was probably named by mistake."""
    from outlast.async_checkpoint.named_files import MANIFEST, LocalStorage

    if not isinstance(storage, LocalStorage):
        return
    if (storage.root / MANIFEST).is_file():
        raise CheckpointError(
            f"{storage.where} is a single checkpoint: give its parent, {storage.root.parent}"
        )
    # Hidden files are ignored: a checkpointer's own (its lock, for example) are hidden.
    held = sorted(path.name for path in storage.root.iterdir() if not path.name.startswith("."))
    if held:
        more = f", ... ({len(held)} in all)" if len(held) > _NAMED else ""
        raise CheckpointError(
            f"{storage.where} holds no checkpoints, but {', '.join(held[:_NAMED])}{more}: give the "
            "folder that was given to `Job` or `Checkpointer`, or is OUTLAST_CHECKPOINT_PATH"
        )


def _confirmed(question: str) -> bool:
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:  # end of input, or Ctrl-C
        typer.echo(err=True)
        return False


def _steps(steps: list[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"

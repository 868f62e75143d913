"""`outlast checkpoint` on a folder of elastic states (`save_all_states`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from outlast.launch.commands import checkpoint_output as output

if TYPE_CHECKING:
    from outlast.async_checkpoint.storage.protocol import Storage
    from outlast.elastic.states.stored import FoundStates

__all__ = ["as_json", "find", "print_table", "refuse_deletion", "verify"]


def find(storage: Storage) -> list[FoundStates]:
    """The checkpoints of states in the folder."""
    from outlast.async_checkpoint.storage.local import LocalStorage
    from outlast.elastic.states import stored

    return stored.survey(storage) if isinstance(storage, LocalStorage) else []


def verify(storage: Storage, numbers: Sequence[int]) -> bool:
    """As `outlast checkpoint verify`; whether there are checkpoints of states.

    Raises:
        CheckpointError: if there is no checkpoint of one of the numbers.
        typer.Exit: with 1, if one is damaged.
    """
    from outlast.async_checkpoint.storage.local import LocalStorage
    from outlast.elastic.states import stored
    from outlast.errors import CheckpointError

    known = {one.number: one.folder for one in find(storage) if one.number is not None}
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
            size = chosen.manifest.size_bytes if chosen is not None else 0
            output.print_verified(f"states {number}", size)
    if damaged:
        raise typer.Exit(1)
    return True


def refuse_deletion(storage: Storage) -> None:
    """Refuse to delete checkpoints of states one by one.

    Raises:
        CheckpointError: if the folder holds checkpoints of states.
    """
    from outlast.errors import CheckpointError

    if find(storage):
        raise CheckpointError(
            f"{storage.where} holds checkpoints of states; every save_all_states() removes the "
            "earlier ones, so there is nothing to delete: to start anew, remove the folder"
        )


def print_table(found: Sequence[FoundStates]) -> None:
    """Print a row for each folder."""
    rows = []
    for one in found:
        about = ["-"] * 3
        if one.manifest is not None:
            size = output.size_text(one.manifest.size_bytes)
            about = [size, str(one.manifest.world_size), str(len(one.manifest.files))]
        rows.append((one.number, about, one.wrong, one.folder))
    output.print_rows(["number", "size", "world size", "states"], rows)


def as_json(one: FoundStates) -> dict[str, object]:
    """A folder as a JSON object."""
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
        "wrong": "" if one.number is None else one.wrong,
    }

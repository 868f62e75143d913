"""Which checkpoints may be restored, once a fault that raises no error was found late.

A checkpoint that was saved after such a fault is complete and verified, and still wrong. A small
file beside the checkpoints says up to which step they can be trusted; it is written before any rank
acts on the fault, so that a job that is started anew finds it too. It is removed when a trusted
checkpoint was restored and the later ones are deleted. A checkpoint with parameters that are not
finite says so itself, in its manifest.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from outlast.async_checkpoint.storage.directory import newest_checkpoint
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from outlast.async_checkpoint.checkpointer import Checkpointer

_FOLDER, _FILE = "trust", "limit.json"
_NON_FINITE = "values of the parameters became infinite or NaN"


def limit_trust(
    checkpointer: Checkpointer, step: int, why: str, skip: dict[str, Any] | None = None
) -> None:
    """Records, durably, that checkpoints of later steps than `step` are wrong. Any thread of one
    rank may call this. `skip`, of plain JSON values, says what is left out after the restore. An
    `OSError` if it cannot be written.
    """
    storage = checkpointer.session.storage
    if skip is not None and (before := _limit(checkpointer)[0]) is not None:
        step = min(step, before)  # replicas that differ may have been found, too
    record = {"step": step, "why": why} | ({} if skip is None else {"skip": skip})
    storage.put_record(_FOLDER, _FILE, json.dumps(record).encode())


@dataclasses.dataclass(frozen=True)
class Trusted:
    """Up to which step checkpoints can be trusted, the newest one of these, and what has happened
    after it. `skip` is as given to `limit_trust`.
    """

    limit: int
    step: int
    fault: str
    skip: dict[str, Any] | None = None


def trusted(checkpointer: Checkpointer) -> Trusted | None:
    """What may be restored; `None` if all checkpoints can be trusted. Called on one rank. A
    `CheckpointError` if none can be trusted, or the record cannot be read.
    """
    limit, skip = _limit(checkpointer)
    if limit is not None:
        fault = "the replicas differed" if skip is None else _NON_FINITE
        return Trusted(limit, _newest(checkpointer, limit), fault, skip)
    newest = newest_checkpoint(checkpointer.session.storage)
    if newest is None or newest.finite is not False:
        return None
    known = checkpointer.checkpoints()
    usable = [info.step for info in known if info.finite] or [
        info.step for info in known if info.finite is None
    ]
    return Trusted(usable[-1], usable[-1], _NON_FINITE) if usable else None


def newest_finite(checkpointer: Checkpointer) -> int | None:
    """The step of the newest checkpoint that is known to have finite parameters."""
    return max((info.step for info in checkpointer.checkpoints() if info.finite), default=None)


def skip_on_record(checkpointer: Checkpointer) -> dict[str, Any] | None:
    """What the last `limit_trust` says that no restore has followed; `None` if there is none."""
    return _limit(checkpointer)[1]


_WRONG = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)  # of a record


def _limit(checkpointer: Checkpointer) -> tuple[int | None, dict[str, Any] | None]:
    storage = checkpointer.session.storage
    try:
        record = json.loads(storage.get(_FOLDER, _FILE))
        skip = record.get("skip")
        return int(record["step"]), None if skip is None else dict(skip)
    except FileNotFoundError:
        return None, None
    except (OSError, RecursionError, *_WRONG) as e:
        where = f"{storage.where}/{_FOLDER}/{_FILE}"
        raise CheckpointError(
            f"{where}, which limits what can be restored, cannot be read: {e}"
        ) from e


def _newest(checkpointer: Checkpointer, limit: int) -> int:
    steps = [info.step for info in checkpointer.checkpoints()]
    if not any(step <= limit for step in steps):
        where = checkpointer.session.storage.where
        raise CheckpointError(
            f"{where} has no checkpoint that can be trusted: those of steps {sorted(steps)} were "
            f"saved after step {limit}, the last one at which all replicas were equal. To restore "
            f"one of them, pass its step to restore, or delete {where}/{_FOLDER}"
        )
    return max(step for step in steps if step <= limit)


def remove_distrusted(checkpointer: Checkpointer, limit: int) -> list[int]:
    """Deletes the checkpoints of steps after `limit`, then the limit; returns these steps. Call it
    on one rank, when a trusted state is the newest one in memory and no save is in progress. A
    `CheckpointError` or `OSError` if a checkpoint cannot be deleted; the limit then stays.
    """
    later = [info.step for info in checkpointer.checkpoints() if info.step > limit]
    for step in later:
        checkpointer.delete(step)
    checkpointer.session.storage.remove(_FOLDER)
    return later

"""Loads states saved by an earlier run of the job, at any size.

All states are loaded from one checkpoint: the newest valid one. Rank 0 chooses it by reading every
byte of it; each replica verifies what it loads. No lock is needed: replicas without a process
group, and other programs, may read while a job saves.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import BinaryIO, TypeVar

from outlast.async_checkpoint.inspection import LocalStorage, candidates, open_bytes, verify_folder
from outlast.elastic import environment
from outlast.elastic.states import pending_save
from outlast.elastic.states.content import file_name
from outlast.elastic.states.replicas import TIMEOUT, Replicas, current
from outlast.elastic.states.state import State, name_of, registered
from outlast.elastic.states.storage import folder_of
from outlast.errors import CheckpointError, CheckpointMismatch, CheckpointReadError
from outlast.system.arguments import Duration, as_timedelta
from outlast.system.error_text import describe

__all__ = ["load_all_states", "load_state"]

log = logging.getLogger("outlast.elastic")

T = TypeVar("T")


def load_state(state: State, *, timeout: Duration = TIMEOUT) -> bool:
    """Loads a state from the newest valid checkpoint. Called on all replicas.

    Args:
        state: the state.
        timeout: the timeout of each wait for the other replicas.

    Returns:
        Whether the state was found, and `load` was called. `False` if no checkpoint path is set,
        if there is no checkpoint, or if the state is not in it.

    Raises:
        CheckpointError: on every replica: if `load` raised on one, names the state, the rank and
            the cause; if there are checkpoints and none is valid; if one has a later format.
        RankTimeout: on every replica: names the replicas that did not make the call in time.
    """
    return bool(_load({name_of(state): state}, timeout))


def load_all_states(*, timeout: Duration = TIMEOUT) -> list[str]:
    """Loads every registered state from the newest valid checkpoint. Called on all replicas.

    All states are read and checked, on all replicas, before any is changed (see `State.prepare`).

    Args:
        timeout: the timeout of each wait for the other replicas.

    Returns:
        The names of the loaded states. Registered states that are not in the checkpoint do not
        change; states in the checkpoint that are not registered are ignored.

    Raises:
        CheckpointError, RankTimeout: as `load_state`.
    """
    return _load(registered(), timeout)


def _load(states: Mapping[str, State], timeout: Duration) -> list[str]:
    limit = as_timedelta("timeout", timeout, allow_zero=True)
    pending_save.drain(quiet=True)
    from_environment = contextlib.nullcontext(environment.checkpoint_path())
    with environment.opened_trial() if environment.from_ray() else from_environment as path:
        if path is None:
            return []
        replicas = current(limit)
        found = replicas.gather(
            f"the choice of a checkpoint in {path}", None, partial(_choose, path)
        )
        if found is None:
            if environment.from_ray():
                log.warning("%s is not a checkpoint of states: it has no manifest", path)
            return []
        where, folder = found
        try:
            files = replicas.together(
                f"the opening of {where}/{folder}", lambda: open_bytes(LocalStorage(where), folder)
            )
            known = {name: state for name, state in states.items() if file_name(name) in files}
            for name in states.keys() - known.keys():
                log.info("the state %r is not in %s/%s", name, where, folder)
            _load_together(replicas, f"{where}/{folder}", files, known)
        except CheckpointError:
            _verified.clear()  # a checkpoint that has become unreadable is verified again
            raise
        return list(known)


def _load_together(
    replicas: Replicas, where: str, files: Mapping[str, BinaryIO], states: Mapping[str, State]
) -> None:
    """Prepares all states on all replicas, then applies them."""
    what = {name: f"the load of state {name!r} from {where}" for name in states}
    prepared = {}
    for name, state in states.items():
        prepare = partial(_named, name, partial(state.prepare, files[file_name(name)]))
        prepared[name] = replicas.together(what[name], prepare, collective=True)
    for name in states:
        apply = partial(_named, name, prepared.pop(name))
        replicas.together(what[name], apply, collective=True)


def _named(name: str, work: Callable[[], T]) -> T:
    """Calls `work`; an error gets the name of the state."""
    try:
        return work()
    except Exception as e:
        raise CheckpointError(f"the state {name!r} could not be loaded: {describe(e)}") from e


# On rank 0, by folder: the checkpoints there, and the one chosen and verified. So states loaded one
# by one come from the same checkpoint, which is verified once.
_verified: dict[str, tuple[list[str], str]] = {}


def _choose(path: str, _: list[object]) -> tuple[str, str] | None:
    """The newest valid checkpoint: the folder of checkpoints, and the name of its directory. On
    rank 0. A `CheckpointError` if none is valid (names what is wrong with each), or if one has a
    later format, or cannot be read now, which must not be skipped.
    """
    storage = LocalStorage(folder_of(path))
    there = [folder for _, folder in candidates(storage)]
    before, chosen = _verified.get(storage.where, ([], ""))
    if before == there and there:
        return storage.where, chosen
    wrong = []
    for folder in there:
        try:
            verify_folder(storage, folder)
        except (CheckpointMismatch, CheckpointReadError):
            raise  # it may be intact
        except CheckpointError as e:
            wrong.append(str(e))
            log.warning("passed over a checkpoint: %s", e)
        else:
            _verified[storage.where] = there, folder
            return storage.where, folder
    if wrong:
        raise CheckpointError(f"no checkpoint in {path} is valid:\n  " + "\n  ".join(wrong))
    return None

"""Gives states back what an earlier run of the job saved, whatever its size was.

All states come from one checkpoint: the newest that is whole. Rank 0 chooses it, and reads all of
it to know; what a replica loads, it verifies itself.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from outlast.async_checkpoint.files import (
    STATES,
    FileCheckpoint,
    LocalStorage,
    candidates,
    is_committed,
    newest_valid,
    verify_folder,
)
from outlast.elastic import environment
from outlast.elastic.replicas.replica_group import TIMEOUT, Replicas, current
from outlast.elastic.states import pending_save, ray_trial
from outlast.elastic.states.state import State, name_of, registered
from outlast.elastic.states.state_files import file_name
from outlast.errors import CheckpointError
from outlast.system.error_text import describe

__all__ = ["load_all_states", "load_state"]

log = logging.getLogger("outlast.elastic")


def load_state(state: State, *, timeout: datetime.timedelta = TIMEOUT) -> bool:
    """Loads a state from the newest checkpoint that is whole. Called on all replicas.

    Args:
        state: the state.
        timeout: how long each wait for the other replicas may take.

    Returns:
        Whether it was saved, and `load` was called. `False` if no checkpoint path is set, if there
        is no checkpoint, or if the state is not in it.

    Raises:
        CheckpointError: on every replica: naming the state, the rank and the cause, if `load`
            raised on one; if there are checkpoints and none is whole; if one is of a later format.
        TimeoutError: on every replica: naming those that did not come.
    """
    return bool(_load({name_of(state): state}, timeout))


def load_all_states(*, timeout: datetime.timedelta = TIMEOUT) -> list[str]:
    """Loads every state that is registered and in the newest checkpoint. Called on all replicas.

    All are read and checked, on all replicas, before any is changed (see `State.prepare`).

    Args:
        timeout: how long each wait for the other replicas may take.

    Returns:
        The names of those that were loaded. States that are not in the checkpoint stay as they
        are; what is in the checkpoint and not registered is left there.

    Raises:
        CheckpointError, TimeoutError: as `load_state`.
    """
    return _load(registered(), timeout)


def _load(states: Mapping[str, State], timeout: datetime.timedelta) -> list[str]:
    pending_save.drain(quiet=True)
    if environment.checkpoint_path() is None and not environment.from_ray():
        return []
    replicas = current(timeout)
    with _source(replicas) as chosen:
        if chosen is None:
            return []
        found = {name: s for name, s in states.items() if file_name(name) in chosen}
        for name in states.keys() - found.keys():
            log.info("the state %r is not in %s", name, chosen.where)
        try:
            _together(replicas, chosen, found)
        except CheckpointError:
            _known.clear()  # what cannot be read any more is not chosen again unseen
            raise
        return list(found)


def _together(replicas: Replicas, chosen: FileCheckpoint, states: Mapping[str, State]) -> None:
    """Prepares all states on all replicas, then applies them."""
    what = {name: f"the load of state {name!r} from {chosen.where}" for name in states}
    prepared = {}
    for name, state in states.items():
        prepare = functools.partial(_prepare, chosen, name, state)
        prepared[name] = replicas.together(what[name], prepare, collective=True)
    for name in states:
        apply = functools.partial(_apply, name, prepared.pop(name))
        replicas.together(what[name], apply, collective=True)


def _prepare(chosen: FileCheckpoint, name: str, state: State) -> Callable[[], None]:
    content = chosen.read(file_name(name))
    try:
        return state.prepare(content)
    except Exception as e:
        raise _unloadable(name, e) from e


def _apply(name: str, apply: Callable[[], None]) -> None:
    try:
        apply()
    except Exception as e:
        raise _unloadable(name, e) from e


def _unloadable(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"the state {name!r} could not be loaded: {describe(error)}")


# ------------------------------------------------------------------------------ which checkpoint


# By path, on rank 0: what was there, and which of it was chosen, after all of it had been read.
# States that are loaded one by one so come from one checkpoint, which is read once to choose it.
_known: dict[str, tuple[list[str], str]] = {}


@contextlib.contextmanager
def _source(replicas: Replicas) -> Iterator[FileCheckpoint | None]:
    if environment.from_ray():
        with ray_trial.opened() as folder:
            yield _of_trial(folder) if folder is not None else None
        return
    path = environment.checkpoint_path()
    assert path is not None
    yield _chosen(path, replicas)


def _of_trial(folder: str) -> FileCheckpoint | None:
    place = Path(os.path.abspath(folder))
    storage = LocalStorage(str(place.parent), STATES)
    if not is_committed(storage, place.name):
        log.warning("%s is no checkpoint of states: it has no manifest", place)
        return None
    verify_folder(storage, place.name)
    return FileCheckpoint(storage, place.name)


def _chosen(path: str, replicas: Replicas) -> FileCheckpoint | None:
    storage = LocalStorage(path, STATES)

    def choose(parts: list[object]) -> str | None:
        there = [folder for _, folder in candidates(storage)]
        before, folder = _known.get(storage.where, ([], ""))
        if before != there or not there:
            newest = newest_valid(storage)
            if newest is None:
                return None
            folder = newest
            _known[storage.where] = (there, folder)
        return folder

    folder = replicas.gather(f"the choice of a checkpoint in {path}", None, choose)
    if folder is None:
        return None
    return replicas.together(
        f"the opening of {storage.where}/{folder}", lambda: FileCheckpoint(storage, folder)
    )

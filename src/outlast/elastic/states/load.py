"""Loads states saved by an earlier run of the job, at any size.

All states are loaded from one checkpoint: the newest valid one. Rank 0 chooses it by reading every
byte of it; each replica also verifies the files that it loads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from outlast.async_checkpoint.named_files import (
    STATES,
    FileCheckpoint,
    LocalStorage,
    candidates,
    is_committed,
    newest_valid,
    verify_folder,
)
from outlast.elastic import environment, ray_trial
from outlast.elastic.replicas.replica_group import TIMEOUT, Replicas, current
from outlast.elastic.states import pending_save
from outlast.elastic.states.state import State, name_of, registered
from outlast.elastic.states.state_files import file_name
from outlast.errors import CheckpointError
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
    if environment.checkpoint_path() is None and not environment.from_ray():
        return []
    replicas = current(limit)
    with _source(replicas) as chosen:
        if chosen is None:
            return []
        found = {name: s for name, s in states.items() if file_name(name) in chosen}
        for name in states.keys() - found.keys():
            log.info("the state %r is not in %s", name, chosen.where)
        try:
            _load_together(replicas, chosen, found)
        except CheckpointError:
            _verified.clear()  # a checkpoint that has become unreadable is verified again
            raise
        return list(found)


def _load_together(replicas: Replicas, chosen: FileCheckpoint, states: Mapping[str, State]) -> None:
    """Prepares all states on all replicas, then applies them."""
    what = {name: f"the load of state {name!r} from {chosen.where}" for name in states}
    prepared = {}
    for name, state in states.items():
        prepare = functools.partial(_prepare, chosen, name, state)
        prepared[name] = replicas.together(what[name], prepare, collective=True)
    for name in states:
        apply = functools.partial(_named, name, prepared.pop(name))
        replicas.together(what[name], apply, collective=True)


def _prepare(chosen: FileCheckpoint, name: str, state: State) -> Callable[[], None]:
    content = chosen.read(file_name(name))
    return _named(name, lambda: state.prepare(content))


def _named(name: str, work: Callable[[], T]) -> T:
    """Calls `work`; an error gets the name of the state."""
    try:
        return work()
    except Exception as e:
        raise CheckpointError(f"the state {name!r} could not be loaded: {describe(e)}") from e


# On rank 0, by path: the checkpoints there, and the one chosen and verified. So states loaded one
# by one come from the same checkpoint, which is verified once.
_verified: dict[str, tuple[list[str], str]] = {}


@contextlib.contextmanager
def _source(replicas: Replicas) -> Iterator[FileCheckpoint | None]:
    if environment.from_ray():
        with ray_trial.opened() as folder:
            yield _trial_checkpoint(folder) if folder is not None else None
        return
    path = environment.checkpoint_path()
    assert path is not None
    yield _newest_checkpoint(path, replicas)


def _trial_checkpoint(folder: str) -> FileCheckpoint | None:
    place = Path(os.path.abspath(folder))
    storage = LocalStorage(str(place.parent), STATES)
    if not is_committed(storage, place.name):
        log.warning("%s is not a checkpoint of states: it has no manifest", place)
        return None
    verify_folder(storage, place.name)
    return FileCheckpoint(storage, place.name)


def _newest_checkpoint(path: str, replicas: Replicas) -> FileCheckpoint | None:
    storage = LocalStorage(path, STATES)

    def choose(parts: list[object]) -> str | None:
        there = [folder for _, folder in candidates(storage)]
        before, folder = _verified.get(storage.where, ([], ""))
        if before != there or not there:
            newest = newest_valid(storage)
            if newest is None:
                return None
            folder = newest
            _verified[storage.where] = (there, folder)
        return folder

    folder = replicas.gather(f"the choice of a checkpoint in {path}", None, choose)
    if folder is None:
        return None
    return replicas.together(
        f"the opening of {storage.where}/{folder}", lambda: FileCheckpoint(storage, folder)
    )

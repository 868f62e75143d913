"""Loads states saved by an earlier run of the job, at any size.

All states are loaded from one checkpoint: the newest valid one. Rank 0 chooses it by reading every
byte of it; each replica verifies what it loads.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from outlast.async_checkpoint.inspection import LocalStorage, open_bytes
from outlast.elastic import environment
from outlast.elastic.states import saving, storage
from outlast.elastic.states.replicas import TIMEOUT, Replicas, current
from outlast.elastic.states.state import State, file_name, name_of, registered
from outlast.errors import CheckpointError
from outlast.system.arguments import Duration, as_timedelta
from outlast.system.error_text import describe
from outlast.system.units import listed

__all__ = ["load_all_states", "load_state"]

log = logging.getLogger("outlast.elastic")

T = TypeVar("T")


def load_state(state: State, *, timeout: Duration = TIMEOUT) -> bool:
    """Loads a state from the newest valid checkpoint. Called on all replicas.

    Args:
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
    saving.drain(quiet=True)
    from_environment = contextlib.nullcontext(environment.checkpoint_path())
    with environment.opened_trial() if environment.from_ray() else from_environment as path:
        if path is None:
            return []
        replicas = current(limit)
        with replicas.ranks.operation():
            what = f"the choice of a checkpoint in {path}"
            found = replicas.gather(what, None, lambda _: storage.choose(path))
            if found is None:
                if environment.from_ray():
                    log.warning("%s is not a checkpoint of states: it has no manifest", path)
                return []
            try:
                return _load_together(replicas, *found, states)
            except CheckpointError:
                storage.forget_choices()
                raise


def _load_together(
    replicas: Replicas, where: str, folder: str, states: Mapping[str, State]
) -> list[str]:
    """Prepares all states on all replicas, then applies them; returns their names."""

    def prepare() -> dict[str, Callable[[], None]]:
        files = open_bytes(LocalStorage(where), folder)
        known = [name for name in states if file_name(name) in files]
        for name in states.keys() - set(known):
            log.info("the state %r is not in %s/%s", name, where, folder)
        return {
            name: _named(name, partial(states[name].prepare, files[file_name(name)]))
            for name in known
        }

    def apply() -> list[str]:
        for name in (names := list(prepared)):
            _named(name, prepared.pop(name))
        return names

    what = f"the load of {listed([repr(name) for name in states], 5)} from {where}/{folder}"
    prepared = replicas.together(what, prepare, collective=True)
    return replicas.together(what, apply, collective=True)


def _named(name: str, work: Callable[[], T]) -> T:
    """Calls `work`; an error gets the name of the state."""
    try:
        return work()
    except Exception as e:
        raise CheckpointError(f"the state {name!r} could not be loaded: {describe(e)}") from e

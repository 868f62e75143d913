"""Saves all states of the job as one checkpoint, or none of them.

    1. The replicas compare what each has registered.
    2. `sync` of each state, in the order of the names, on all replicas.
    3. Rank 0 saves each state, into a working folder, or into memory if the rest is done in the
       background.
    4. Rank 0 commits the checkpoint, and sends its path to the others.

A failure of one replica in any of these steps is an error on all, and the previous checkpoint
stays.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, overload

from outlast.async_checkpoint.named_files import STATES, LocalStorage, new_checkpoint, replace_file
from outlast.elastic import environment, ray_trial
from outlast.elastic.replicas.replica_group import TIMEOUT, Replicas, current
from outlast.elastic.states import pending_save
from outlast.elastic.states.pending_save import PendingSave
from outlast.elastic.states.state import State, name_of, registered
from outlast.elastic.states.state_files import StateCopy, Write, checked, file_name
from outlast.errors import CheckpointError
from outlast.system.arguments import Duration, as_timedelta

__all__ = ["save_all_states", "save_state"]

log = logging.getLogger("outlast.elastic")

Writes = dict[str, Write]


@overload
def save_all_states(
    asynchronous: Literal[False] = ...,
    *,
    timeout: Duration = ...,
    metrics: Mapping[str, Any] | None = ...,
) -> str | None: ...
@overload
def save_all_states(
    asynchronous: Literal[True], *, timeout: Duration = ..., metrics: Mapping[str, Any] | None = ...
) -> PendingSave | None: ...
def save_all_states(
    asynchronous: bool = False,
    *,
    timeout: Duration = TIMEOUT,
    metrics: Mapping[str, Any] | None = None,
) -> str | PendingSave | None:
    """Saves every `State` of the job. Called on all replicas.

    The checkpoint becomes visible in one atomic step, when all of it is durable; only then is the
    previous one removed.

    Args:
        asynchronous: whether to return when all states are saved to memory, and to write them in
            the background. Waits for a pending save first, so there is at most one.
        timeout: the timeout of each wait for other replicas, including for rank 0 to write.
        metrics: reported with the checkpoint inside a Ray Tune trial.

    Returns:
        The directory of the checkpoint, or the handle of the background save. `None` if no
        checkpoint path is set; and, if several replicas have no process group, on the replicas that
        do not write.

    Raises:
        CheckpointError: on every replica: if a state fails, names it, the rank and the cause; if
            the replicas have registered different states, names the difference; if another job
            saves into the same folder; if an earlier background save has failed.
        RankTimeout: on every replica: names those that did not make the call in time.
    """
    limit = as_timedelta("timeout", timeout, allow_zero=True)
    pending_save.drain()
    in_trial = environment.from_ray()
    path = environment.checkpoint_path()
    if path is None and not in_trial:
        return None
    replicas = current(limit)
    states = _registered_on_all(replicas)
    for name, state in states.items():
        replicas.together(f"the sync of state {name!r}", state.sync, collective=True)
    writes: Writes = {name: checked(name, state.save) for name, state in states.items()}
    if in_trial:
        directory = _save_on_rank_0(replicas, "Ray", lambda: _report(writes, metrics or {}))
        return pending_save.completed(directory) if asynchronous else directory
    assert path is not None
    world_size = replicas.world_size
    if not asynchronous:
        return _save_on_rank_0(replicas, path, lambda: _write(path, writes, world_size))
    copies: dict[str, StateCopy] = {}

    def copy(parts: list[Any]) -> None:
        for name, write in writes.items() if replicas.writes else ():
            copies[name] = StateCopy()
            copies[name].fill(write)

    def commit() -> str | None:
        copied: Writes = {name: each.write for name, each in copies.items()}
        try:
            return _save_on_rank_0(replicas, path, lambda: _write(path, copied, world_size))
        finally:
            free()

    def free() -> None:
        # A caller that keeps an exception keeps its frames, and what they refer to.
        for each in copies.values():
            each.close()

    try:
        replicas.gather("the copy of states into memory", None, copy)
    except BaseException:
        free()
        raise
    return pending_save.start(replicas, commit)


def save_state(
    state: State,
    checkpoint_dir: str | os.PathLike[str] | None,
    sync: bool = True,
    *,
    timeout: Duration = TIMEOUT,
) -> None:
    """Saves one state into a file of a folder, durably and in one step. Called on all replicas.

    The caller manages the folder: `load_state` only reads checkpoints that `save_all_states`
    commits.

    Args:
        state: the state.
        checkpoint_dir: the folder, which is created; `None` to synchronize the state only.
        sync: whether to call `sync` first, on all replicas; `save` is called on rank 0.
        timeout: the timeout of each wait for the other replicas.

    Raises:
        CheckpointError: on every replica: names the state, the rank and the cause.
        RankTimeout: on every replica: names those that did not make the call in time.
    """
    limit = as_timedelta("timeout", timeout, allow_zero=True)
    pending_save.drain()
    name = name_of(state)
    replicas = current(limit)
    if sync:
        replicas.together(f"the sync of state {name!r}", state.sync, collective=True)

    def write() -> None:
        if checkpoint_dir is None or not replicas.writes:
            return
        replace_file(Path(checkpoint_dir) / file_name(name), checked(name, state.save))

    replicas.together(f"the save of state {name!r}", write)


def _registered_on_all(replicas: Replicas) -> dict[str, State]:
    """The registered states, after a check that all replicas have the same ones."""
    what = "the comparison of registered states"
    states = registered()
    if replicas.gather(what, list(states), _differences):
        # On some replicas, a dead state may still be kept alive by a reference cycle.
        del states
        gc.collect()
        states = registered()
        differences = replicas.gather(what, list(states), _differences)
        if differences:
            raise CheckpointError(f"the replicas have registered different states: {differences}")
    return states


def _differences(names: list[list[str]]) -> str:
    first = set(names[0])
    differences = []
    for rank, own in enumerate(names):
        lacks, more = sorted(first - set(own)), sorted(set(own) - first)
        if lacks:
            differences.append(f"rank 0 has {', '.join(map(repr, lacks))}, rank {rank} does not")
        if more:
            differences.append(f"rank {rank} has {', '.join(map(repr, more))}, rank 0 does not")
    return "; ".join(differences)


def _save_on_rank_0(replicas: Replicas, where: str, write: Callable[[], str]) -> str | None:
    """Calls `write` on rank 0; returns the path of the checkpoint on all replicas."""
    directory = replicas.gather(
        f"the save into {where}", None, lambda parts: write() if replicas.writes else None
    )
    replicas.linger()
    return directory


def _write(path: str, writes: Writes, world_size: int) -> str:
    with new_checkpoint(LocalStorage(path, STATES), world_size) as checkpoint:
        while writes:  # once a state is written, its copy in memory is freed
            name = next(iter(writes))
            checkpoint.add(file_name(name), writes.pop(name))
        return checkpoint.commit()


def _report(writes: Writes, metrics: Mapping[str, Any]) -> str:
    with tempfile.TemporaryDirectory(prefix="outlast-") as folder:
        return ray_trial.report(_write(folder, writes, 1), metrics)

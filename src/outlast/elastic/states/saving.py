"""Saves all states of the job as one checkpoint, or none of them.

    1. The replicas compare what each has registered.
    2. `sync` of each state, in the order of the names, on all replicas.
    3. Rank 0 saves each state into memory, and gives all of them to its `Checkpointer`, as tensors
       of bytes: it makes the checkpoint durable and visible, and removes the previous one.
    4. Rank 0 sends the path of the checkpoint to the others.

A failure of one replica in any of these steps is an error on all, and the previous checkpoint
stays.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, overload

from outlast.elastic import environment
from outlast.elastic.states import pending_save, storage
from outlast.elastic.states.content import MemoryFile, file_name
from outlast.elastic.states.pending_save import PendingSave
from outlast.elastic.states.replicas import TIMEOUT, Replicas, current
from outlast.elastic.states.state import State, name_of, registered
from outlast.errors import CheckpointError
from outlast.system.arguments import Duration, as_timedelta
from outlast.system.error_text import describe
from outlast.system.files import fsync_folder, make_folder

__all__ = ["save_all_states", "save_state"]


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
    previous one removed. The process of rank 0 has the folder to itself until it ends.

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
    if not replicas.writes:
        storage.release()  # this process may have been rank 0 before a restart in place
    states = _registered_on_all(replicas)
    for name, state in states.items():
        replicas.together(f"the sync of state {name!r}", state.sync, collective=True)
    if in_trial:
        directory = _on_rank_0(replicas, "Ray", lambda: _report(states, metrics or {}))
        return pending_save.completed(directory) if asynchronous else directory
    assert path is not None
    if not asynchronous:
        return _on_rank_0(replicas, path, lambda: storage.begin(path, _contents(states)).finish())
    begun: list[storage.Begun] = []

    def begin(_: list[Any]) -> None:
        if replicas.writes:
            begun.append(storage.begin(path, _contents(states)))

    replicas.gather("the copy of states into memory", None, begin)
    return pending_save.start(
        replicas, lambda: _on_rank_0(replicas, path, lambda: begun[0].finish())
    )


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
        content = _content(name, state)
        folder = Path(checkpoint_dir)
        make_folder(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as working:
            written = Path(working) / file_name(name)
            with written.open("wb") as file:
                file.write(content.tensor().numpy().data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(written, folder / written.name)
        fsync_folder(folder)

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


def _on_rank_0(replicas: Replicas, where: str, work: Callable[[], str]) -> str | None:
    """Calls `work` on rank 0; returns the path of the checkpoint on all replicas."""
    directory = replicas.gather(
        f"the save into {where}", None, lambda _: work() if replicas.writes else None
    )
    replicas.linger()
    return directory


def _contents(states: Mapping[str, State]) -> dict[str, MemoryFile]:
    return {file_name(name): _content(name, state) for name, state in states.items()}


def _content(name: str, state: State) -> MemoryFile:
    memory = MemoryFile()
    with memory.open() as file:
        try:
            state.save(file)
        except Exception as e:
            raise CheckpointError(f"the state {name!r} could not be saved: {describe(e)}") from e
    return memory


def _report(states: Mapping[str, State], metrics: Mapping[str, Any]) -> str:
    with tempfile.TemporaryDirectory(prefix="outlast-") as folder:
        try:
            storage.begin(folder, _contents(states)).finish()
        finally:
            storage.release()
        return environment.report_to_trial(folder, metrics)

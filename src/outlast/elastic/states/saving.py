"""Saves all states of the job as one checkpoint, or none of them.

    1. The replicas compare what each has registered.
    2. `sync` of each state, in the order of the names, on all replicas.
    3. Rank 0 saves each state into memory, and gives all of them to its `Checkpointer`, as tensors
       of bytes: it makes the checkpoint durable and visible, and removes the previous one.
    4. Rank 0 sends the path of the checkpoint to the others.

A failure of one replica in any of these steps is an error on all, and the previous checkpoint
stays.

At most one save is in the background. Its thread is not a daemon, so a program that ends waits for
the save in progress.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, overload

from outlast.async_checkpoint.handle import Handle
from outlast.elastic import environment
from outlast.elastic.states import storage
from outlast.elastic.states.replicas import TIMEOUT, Replicas, current
from outlast.elastic.states.state import State, file_name, name_of, registered
from outlast.elastic.states.storage import MemoryFile
from outlast.errors import CheckpointError, StoreError
from outlast.system.arguments import Duration, as_timedelta
from outlast.system.error_text import describe
from outlast.system.files import make_folder, replacing

__all__ = ["PendingSave", "save_all_states", "save_state"]

log = logging.getLogger("outlast.elastic")

STALE_S = 10.0
"""How long to wait for a save whose replicas no longer exist."""


class PendingSave(Handle["str | None"]):
    """A save of all states in the background. Any thread may use it.

    Its result is the directory of the checkpoint; `None` on a replica that does not know it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None

    @property
    def directory(self) -> str | None:
        """The checkpoint, once it is committed; `None` on a replica that does not know it."""
        return super().result(0.0) if self.succeeded else None

    def wait(self, timeout: Duration | None = None) -> None:
        """Waits until the checkpoint is committed.

        Raises:
            TimeoutError: if it is not committed within `timeout`.
            CheckpointError: if the save has failed; names rank, host and cause.
        """
        self.result(timeout)

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """Waits for the end of the save, and returns its error; `None` if it is committed. A
        `TimeoutError` as `wait`.
        """
        try:
            return super().exception(timeout)
        finally:
            if self.done():
                self._join()

    def _what(self) -> str:
        return "the states are"

    def _begin(self, work: Callable[[], str | None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(work,), name="outlast-states")
        self._thread.start()

    def _run(self, work: Callable[[], str | None]) -> None:
        directory: str | None = None
        error: Exception | None = None
        try:
            directory = work()
        except Exception as e:  # noqa: BLE001 - raised by `wait`
            log.error("a save in the background failed: %s", e)
            error = e
            if isinstance(e, StoreError):
                error = CheckpointError(f"a save in the background failed: {e}")
                error.__cause__ = e
        self._end(error, directory)

    def _join(self) -> None:
        """Waits until the save has ended, and its thread with it. Raises nothing."""
        self._await_end(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __repr__(self) -> str:
        return f"<PendingSave {self._state_text}>"


_last: tuple[PendingSave, Replicas] | None = None


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
    drain()
    in_trial = environment.from_ray()
    path = environment.checkpoint_path()
    if path is None and not in_trial:
        return None
    replicas = current(limit)
    with replicas.ranks.operation():
        if not replicas.writes:
            storage.release()  # this process may have been rank 0 before a restart in place
        states = _registered_on_all(replicas)
        for name, state in states.items():
            replicas.together(f"the sync of state {name!r}", state.sync, collective=True)
        if in_trial:
            directory = _on_rank_0(replicas, "Ray", lambda: _report(states, metrics or {}))
            return _ended(directory) if asynchronous else directory
        assert path is not None
        if not asynchronous:
            return _on_rank_0(replicas, path, lambda: storage.begin(path, _contents(states))())
        begun: list[Callable[[], str]] = []

        def begin(_: list[Any]) -> None:
            if replicas.writes:
                begun.append(storage.begin(path, _contents(states)))

        replicas.gather("the copy of states into memory", None, begin)
    global _last
    pending = PendingSave()
    pending._begin(lambda: _on_rank_0(replicas, path, lambda: begun[0]()))
    _last = pending, replicas
    return pending


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
        checkpoint_dir: the folder, which is created; `None` to synchronize the state only.
        sync: whether to call `sync` first, on all replicas; `save` is called on rank 0.
        timeout: the timeout of each wait for the other replicas.

    Raises:
        CheckpointError: on every replica: names the state, the rank and the cause.
        RankTimeout: on every replica: names those that did not make the call in time.
    """
    limit = as_timedelta("timeout", timeout, allow_zero=True)
    drain()
    name = name_of(state)
    replicas = current(limit)

    def write() -> None:
        if checkpoint_dir is None or not replicas.writes:
            return
        content = _content(name, state)
        path = Path(checkpoint_dir) / file_name(name)
        make_folder(path.parent)
        with replacing(path, path.with_name(f".tmp-{path.name}")) as file:
            file.write(content.tensor().numpy().data)

    with replicas.ranks.operation():
        if sync:
            replicas.together(f"the sync of state {name!r}", state.sync, collective=True)
        replicas.together(f"the save of state {name!r}", write)


def drain(*, quiet: bool = False) -> None:
    """Waits for the pending save; a `CheckpointError` if it failed, and `wait` was not called on
    its handle. `quiet` leaves this to the next save. If its replicas no longer exist, because of a
    restart in place, it is given a limited time, and its outcome is only in the log.
    """
    global _last
    if _last is None:
        return
    pending, replicas = _last
    stale = not replicas.current
    if stale and not pending._await_end(STALE_S):
        replicas.ranks.give_up("the process group of this call is gone")
    pending._join()
    if quiet and not stale:
        return
    _last = None
    if not stale and not pending._seen:
        pending.wait()


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
            error = CheckpointError(f"the replicas have registered different states: {differences}")
            raise replicas.ranks.shared(error, replicas.ranks.rank)
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


def _ended(directory: str | None) -> PendingSave:
    """The handle of a save that was performed in the foreground."""
    pending = PendingSave()
    pending._end(None, directory)
    return pending


def _on_rank_0(replicas: Replicas, where: str, work: Callable[[], str]) -> str | None:
    """Calls `work` on rank 0; returns the path of the checkpoint on all replicas."""

    def save(_: list[Any]) -> str | None:
        return work() if replicas.writes else None

    return replicas.gather(f"the save into {where}", None, save, until_read=True)


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
            storage.begin(folder, _contents(states))()
        finally:
            storage.release()
        return environment.report_to_trial(folder, metrics)

"""`Checkpointer`: saves in the background, and restores nothing that was not verified.

    checkpointer = Checkpointer("checkpoints", keep=Retention(last=3))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    step = checkpointer.restore(state)          # None: there is nothing yet
    ...
    checkpointer.save(step, state)              # returns at once
    ...
    checkpointer.close()                        # waits for what is under way

Every rank makes one, for the same folder, and calls the same methods in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from outlast.async_checkpoint.environment import ranks
from outlast.async_checkpoint.failure_policy import FailurePolicy
from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.restore.restorer import Restorer
from outlast.async_checkpoint.retention import Retention
from outlast.async_checkpoint.save.folder_session import session_for
from outlast.async_checkpoint.save.outcomes import SaveOutcomes
from outlast.async_checkpoint.save.pipeline import SavePipeline
from outlast.async_checkpoint.save.structure_exchange import StructureExchange
from outlast.async_checkpoint.snapshot.take import Snapshotter
from outlast.async_checkpoint.storage import directory as folders
from outlast.async_checkpoint.storage.directory import CheckpointInfo
from outlast.coordination.call_ledger import connect_ledger
from outlast.errors import CheckpointError
from outlast.events import (
    Emitter,
    Sink,
)

__all__ = ["Checkpointer"]

log = logging.getLogger("outlast.checkpoint")

_FOR_WRITER_S = 0.2
_FOR_FAULT = datetime.timedelta(seconds=30)
_NOTHING = datetime.timedelta()
_FOR_EXIT = datetime.timedelta(minutes=10)


class Checkpointer:
    """Saves and restores the state of a training job.

    A save is a snapshot, which takes as long as a copy in memory, and then work in the background:
    a process writes and checksums this rank's part, and when all ranks' bytes are durable, the
    checkpoint becomes visible in one atomic step. What fails on one rank fails on all, and nothing
    of it is ever loaded.

    Args:
        path: a folder on a file system that all ranks share, or a URL that fsspec takes.
        keep: which checkpoints stay; all of them by default.
        overlap: optimizers. What only they change is copied beside the next forward and backward
            pass, and their `step` waits for the copy; everything else is copied at once.
        group: the ranks that save together; the default process group, or this process alone
            where there is none: several ranks make the process group first.
        max_in_flight: how many saves may be under way. Each has a buffer of the size of this
            rank's part; a save that finds none free waits.
        on_failure: `"raise"`: a save that failed is raised by the next call, unless its handle
            was asked; a `FailurePolicy`: logged, up to a number of failures in a row.
        threads: that the writer process writes with.
        linger: how long snapshots stay in memory after this process was killed, for the process
            that replaces it; zero for not at all.
        timeout: how long to wait for other ranks where this one has to.
        events: where events go; `OUTLAST_EVENTS_DIR` by default.

    Raises:
        CheckpointError: if another job is using the folder; names it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: Retention | None = None,
        overlap: Optimizer | Iterable[Optimizer] = (),
        group: Any = None,
        max_in_flight: int = 1,
        on_failure: str | FailurePolicy = "raise",
        threads: int = 2,
        linger: datetime.timedelta = datetime.timedelta(minutes=2),
        timeout: datetime.timedelta = datetime.timedelta(minutes=30),
        events: Sink | None = None,
    ) -> None:
        if max_in_flight < 1 or threads < 1:
            raise ValueError(f"max_in_flight={max_in_flight} and threads={threads} are at least 1")
        if isinstance(on_failure, str) and on_failure != "raise":
            raise ValueError(f"on_failure={on_failure!r} is neither 'raise' nor a FailurePolicy")
        self._closed = True  # until it is made
        given = os.fspath(path)
        # One name for one folder: two sessions on it would not know of each other.
        self._url = given if "://" in given else str(Path(given).expanduser().resolve())
        optimizers = [overlap] if isinstance(overlap, Optimizer) else list(overlap)
        self._timeout = timeout.total_seconds()
        if ranks() > 1 and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"there are {ranks()} ranks (WORLD_SIZE), and no process group: make that first "
                "(torch.distributed.init_process_group), the checkpointer needs it"
            )
        ledger = connect_ledger("checkpoint", group)
        self.rank, self.world_size = ledger.rank, ledger.world_size
        self._job = ledger.agree("job", uuid.uuid4().hex[:12])
        self._session, taken_over = session_for(
            self._url, threads=threads, linger_s=linger.total_seconds()
        )
        if taken_over:
            self._take_over()
        if self.rank != 0:
            self._session.unlock()  # this process may have been rank 0 before
        self._session.pool.grow(max_in_flight)
        self._emitter = Emitter(events if events is not None else self._session.sink(self.rank))
        self._emitter.place(rank=self.rank)
        everywhere = dist.is_available() and dist.is_initialized()
        global_rank = dist.get_rank() if everywhere else 0
        self._session.memo.move(global_rank, self.rank, self.world_size)
        restores = connect_ledger("restore", group)
        self._restorer = Restorer(self._session, restores, group, self._timeout, self._emitter)
        try:
            self._restorer.open(self._owner_name())
        except BaseException:
            if not taken_over:  # no other checkpointer knows of it
                self._session.close(0.0)
            raise
        policy = on_failure if isinstance(on_failure, FailurePolicy) else None
        structures = connect_ledger("structure", group)
        self._outcomes = SaveOutcomes(self._session, keep or Retention(), policy, self._emitter)
        self._pipeline = SavePipeline(
            self._session,
            ledger,
            StructureExchange(structures, self._timeout, self._session.memo),
            Snapshotter(self._session, optimizers, self.rank, self.world_size, self._job),
            self._outcomes,
            self._emitter.clock,
            self._timeout,
        )
        self._closed = False
        self._at_exit = _close_at_exit(self)
        self._session.owner = self

    # ------------------------------------------------------------------------------ saving

    def save(
        self, step: int, state_dict: Mapping[str, Any], *, metric: float | None = None
    ) -> SaveHandle:
        """Saves `state_dict` as it is now. Returns as soon as the training may go on.

        Args:
            step: names the checkpoint; one of the same step is replaced when this one is
                committed.
            state_dict: nested dicts and lists of tensors (also DTensor, ShardedTensor) and of
                values that pickle takes. What several ranks have is saved by one of them.
            metric: how good it is, for `Retention(best=...)`.

        Raises:
            ValueError: for a step that is no number, or is being saved already.
            CheckpointError: what cannot be saved; or an earlier save that failed, and then this one
                is under way all the same.
        """
        self._check_open()
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} is no number from 0 on")
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"state_dict is a {type(state_dict).__name__}, not a dict")
        return self._pipeline.save(step, state_dict, metric)

    # --------------------------------------------------------------------------- restoring

    def restore(
        self,
        state_dict: dict[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        optional: Iterable[str] = (),
        weights_only: bool = True,
    ) -> int | None:
        """Loads the newest valid checkpoint into `state_dict`, in place. Called on all ranks.

        A snapshot that is still in memory is taken if all ranks have it and no checkpoint on
        storage is newer. A checkpoint that is not whole or not what was written is passed over
        for the one before, with a warning in the log and an event. Tensors are filled in place
        and resharded as needed; other values replace what stands there; an empty dict is filled
        with what the checkpoint has under it.

        Args:
            state_dict: what to load into.
            step: a certain one, and no other.
            strict: whether names that only one side has are an error.
            optional: how names begin that may be on one side only all the same. What is not in
                the checkpoint stays as it is.
            weights_only: `False` lets values be unpickled that may run code: only for
                checkpoints that you trust.

        Returns:
            The step that was loaded; `None` if there is none at all.

        Raises:
            CheckpointError: if there are some, but none is valid: names what is wrong with each;
                or if the checkpoint does not fit: names keys, shapes, dtypes. When none is valid,
                tensors may hold parts of a damaged one, and must not be trained on.
        """
        self._check_open()
        self._pipeline.seal_all()
        found = self._restorer.restore(state_dict, step, strict, tuple(optional), weights_only)
        self._pipeline.prepare(state_dict)
        return found

    def list(self) -> list[CheckpointInfo]:
        """The committed checkpoints, oldest first. Only their manifests are read."""
        return folders.list_checkpoints(self._session.storage)

    def verify(self, step: int) -> CheckpointInfo:
        """Reads the checkpoint of `step` whole, on this rank.

        Raises:
            CheckpointError: naming the file and what is wrong with it.
        """
        return folders.verify(self._session.storage, step)

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of `step`. To be called on one rank, and for no step that is
        being saved.

        Raises:
            CheckpointError: if there is none.
        """
        self._check_open()
        folders.delete(self._session.storage, step)

    # ------------------------------------------------------------------------------ ending

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Waits until all saves have ended.

        Raises:
            CheckpointError: of the first one that failed.
            TimeoutError: when it takes longer than `timeout`.
        """
        began = time.monotonic()
        for save in self._pipeline.pending:
            spent = datetime.timedelta(seconds=time.monotonic() - began)
            save.handle.wait(None if timeout is None else max(timeout - spent, _NOTHING))
        self._outcomes.raise_unseen()

    def abort(self) -> None:
        """Drops all saves that are under way, on all ranks; does not wait. The checkpointer is of
        no use afterwards, but its buffers, its writer and its snapshots are taken over by the next
        one for this folder in this process.
        """
        if not self._closed:
            self._drop()

    def close(self, timeout: datetime.timedelta | None = None) -> None:
        """Waits for the saves that are under way, and gives everything back. Also on leaving a
        `with` block, and at the end of the program, where it waits at most ten minutes.

        Args:
            timeout: what is not committed then is dropped, on all ranks.

        Raises:
            CheckpointError: if a save failed, or was dropped, that nobody has asked about.
        """
        if self._closed:
            return
        self._pipeline.seal_all()
        in_time = self._pipeline.finish(None if timeout is None else timeout.total_seconds())
        late = [save.step for save in self._pipeline.pending]
        if not in_time:
            self._pipeline.abort()
        self._closed = True
        self._at_exit()
        self._session.close(5.0 if in_time else 0.0)
        self._session.owner = None
        if late:
            raise CheckpointError(f"steps {late} were not committed within {timeout}, and dropped")
        self._outcomes.raise_unseen()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self.world_size == 1 and issubclass(kind, Exception | SystemExit):
            # What left the block is what the caller must see; an error of a save is in the log.
            with contextlib.suppress(CheckpointError):
                self.close(_FOR_FAULT)
        else:
            # A rank that fails is to be restarted, and must not be held up by a save: other ranks
            # may never finish theirs.
            self.abort()

    # ------------------------------------------------------------------------------ within

    def _take_over(self) -> None:
        before = self._session.owner
        if before is not None:
            before._drop()  # also if it was aborted: an interrupt may have cut that short
            # A restart must not wait for a disk that is slow to make durable what is dropped.
            self._session.writer.await_idle(_FOR_WRITER_S)
        self._session.pool.give_back_all()

    def _drop(self) -> None:
        self._closed = True
        self._pipeline.abort()
        self._at_exit()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this checkpointer is closed")

    def _owner_name(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()}, job {self._job}"


def _close_at_exit(checkpointer: Checkpointer) -> Any:
    """Registers a close at the end of the program; returns what takes that back."""

    def close() -> None:
        with contextlib.suppress(CheckpointError):  # it is in the log
            checkpointer.close(_FOR_EXIT)

    atexit.register(close)
    return lambda: atexit.unregister(close)

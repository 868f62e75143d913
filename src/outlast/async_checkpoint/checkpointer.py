"""`Checkpointer`: saves in the background, and restores only what it has verified.

Every rank creates one for the same folder, and calls the same methods in the same order.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import socket
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import torch.distributed as dist
from torch.optim import Optimizer

from outlast.async_checkpoint.environment import events_folder, ranks
from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.peer_copies.arrangement import DEFAULT_BYTES_PER_S, check_replicas
from outlast.async_checkpoint.policies import FailurePolicy, Retention
from outlast.async_checkpoint.restore.from_copies import arrange_copies
from outlast.async_checkpoint.restore.restorer import Restorer
from outlast.async_checkpoint.save.folder_session import session_for
from outlast.async_checkpoint.save.open_folder import open_folder
from outlast.async_checkpoint.save.round import is_due_to_restart
from outlast.async_checkpoint.save.saves import Saves
from outlast.async_checkpoint.snapshot.overlap import optimizers_of
from outlast.async_checkpoint.storage import directory as folders
from outlast.async_checkpoint.storage.directory import CheckpointInfo
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger, connect_ledger
from outlast.coordination.stores.store import MemoryStore
from outlast.coordination.training_step import report_step, restart_count
from outlast.errors import CheckpointError, SaveCancelled
from outlast.events.emitter import Emitter, Sink
from outlast.events.spool import keep_events_beside
from outlast.system.arguments import Duration, as_int, as_number, as_timedelta, as_wait

log = logging.getLogger("outlast.checkpoint")

_FOR_FAULT = datetime.timedelta(seconds=30)
_FOR_EXIT = datetime.timedelta(minutes=10)


class Checkpointer:
    """Saves and restores the state of a training job.

    A save takes a snapshot, in the time of an in-memory copy; the rest happens in the background. A
    writer process writes and checksums this rank's part, and when the bytes of all ranks are
    durable, the checkpoint becomes visible in one atomic step. A save that fails on one rank fails
    on all ranks, and no part of it is ever loaded.

    Args:
        path: a folder on a file system that all ranks share, or a URL that fsspec opens.
        keep: which checkpoints to keep, or how many of the newest; all of them by default.
        overlap: an optimizer, or several. Tensors that only they change are copied during the next
            forward and backward pass, and their `step` waits for the copy. Everything else is
            copied at once; so are the tensors of a wrapped optimizer without a torch optimizer in
            it, with a warning. `False` copies everything at once.
        group: the ranks that save together. By default, the default process group, or this process
            alone if there is none; several ranks must create the process group first. `"alone"` is
            this process alone, with a folder of its own.
        max_in_flight: how many saves may be in progress. Each needs a buffer of the size of this
            rank's part; a save waits until a buffer is free.
        on_failure: with `"raise"`, the next call raises the error of a failed save, unless it was
            read from the handle. A `FailurePolicy` first logs a number of consecutive failures.
        threads: the number of writing threads in the writer process.
        linger: how long snapshots stay in memory after this process is killed, for its replacement;
            zero discards them.
        timeout: how long each wait of a save may take: for other ranks, for the writer process and
            its disk, for a free buffer. A save that takes longer fails on all ranks.
        events: the sink of events; a file in `OUTLAST_EVENTS_DIR` by default.
        replicas: 1 keeps a copy of each rank's snapshot in another host's memory.
        replica_bandwidth: how many bytes per second each rank may send for its copies.

    Raises:
        CheckpointError: if another job is using the folder; names that job.
        ValueError: if this process has another checkpointer for the folder that was not closed.
            After a restart in place a new one takes over from the one before.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: Retention | int | None = None,
        overlap: Optimizer | Iterable[Optimizer] | bool = False,
        group: Any = None,
        max_in_flight: int = 1,
        on_failure: str | FailurePolicy = "raise",
        threads: int = 2,
        linger: Duration = datetime.timedelta(minutes=2),
        timeout: Duration = datetime.timedelta(minutes=30),
        events: Sink | None = None,
        replicas: int = 0,
        replica_bandwidth: float = DEFAULT_BYTES_PER_S,
    ) -> None:
        retention = Retention.of(keep)
        max_in_flight = as_int("max_in_flight", max_in_flight, at_least=1)
        threads = as_int("threads", threads, at_least=1)
        replicas, replica_bandwidth = check_replicas(replicas, replica_bandwidth)
        if on_failure != "raise" and not isinstance(on_failure, FailurePolicy):
            raise ValueError(f"on_failure must be 'raise' or a FailurePolicy, not {on_failure!r}")
        self._closed = True  # until the constructor ends
        given = os.fspath(path).removeprefix("file://")
        # One name for each folder: two sessions for one folder would not know of each other.
        self._url = given.rstrip("/") if "://" in given else str(Path(given).expanduser().resolve())
        optimizers, not_hooked = optimizers_of(overlap)
        timeout_s = as_timedelta("timeout", timeout, allow_zero=True).total_seconds()
        linger_s = as_timedelta("linger", linger, allow_zero=True).total_seconds()
        self._alone = alone = group == "alone"
        grouped = not alone and dist.is_available() and dist.is_initialized()
        if ranks() > 1 and not (grouped or alone):
            raise ValueError(
                f"there are {ranks()} ranks (WORLD_SIZE) and no process group: call "
                "torch.distributed.init_process_group before making a Checkpointer"
            )
        self._restarts = restart_count()
        if alone:
            group, ledger = None, CallLedger(MemoryStore(), "checkpoint", 0, 1)
        else:
            ledger = connect_ledger("checkpoint", group)
        self.ledger = ledger  # also for what a `Job` has to agree on
        self.rank, self.world_size = ledger.rank, ledger.world_size
        if not_hooked and self.rank == 0:
            log.warning(
                "overlap: the step of %s cannot wait for a copy, so its tensors are copied at once",
                ", ".join(not_hooked),
            )
        job = ledger.agree("job", uuid.uuid4().hex[:12])
        self.ranks = Agreement(ledger.child("restore"), timeout_s, self._url)
        with self.ranks.operation():
            self.session, taken_over = session_for(
                self._url, threads=threads, linger_s=linger_s, replicas=replicas
            )
            self.session.writer.timeout_s = timeout_s
            if taken_over:
                self.session.end_owner()
            if self.rank != 0:
                self.session.unlock()
            self.session.pool.grow(max_in_flight, spare=replicas)
            self.emitter = Emitter(events if events is not None else self.session.sink(self.rank))
            self.emitter.place.rank = self.rank
            global_rank = dist.get_rank() if grouped else 0
            self.session.memo.ranks = global_rank, self.rank, self.world_size
            self.restorer = Restorer(self.session, self.ranks, group, self.emitter)
            try:
                owner = f"process {os.getpid()} on {socket.gethostname()}, job {job}"
                open_folder(self.session, self.ranks, owner, known=taken_over)
                if not alone:
                    keep_events_beside(events_folder(), self._url, warn=self.rank == 0)
                if replicas:
                    self.restorer.copies = arrange_copies(
                        self.session, self.ranks, ledger, self.emitter, replica_bandwidth
                    )
            except BaseException:
                if not taken_over:  # no other checkpointer knows of it
                    self.session.close(0.0)
                raise
        self.saves = Saves(
            self.session,
            ledger,
            self.emitter,
            job=job,
            optimizers=optimizers,
            keep=retention,
            policy=on_failure if isinstance(on_failure, FailurePolicy) else None,
        )
        self.resumes_saves = True  # after a restore, those that a fault has cut off; else a `Job`
        self._closed = False
        atexit.register(self._close_at_exit)
        self.session.owner = self

    # ------------------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        *,
        metric: SupportsFloat | None = None,
        finite: Collection[str] = (),
        place: str = "",
    ) -> SaveHandle:
        """Saves `state_dict` as it is now. Returns as soon as training may continue.

        Args:
            step: the training step. A checkpoint of the same step is replaced when this one is
                committed.
            state_dict: nested dicts and lists of tensors (including DTensor and ShardedTensor) and
                of values that a restore can load without running code: see "What can be saved" in
                the guide. Replicated parts are saved by one rank.
            metric: the quality of the checkpoint, for `Retention(best=...)`: a number, or a tensor
                of one element.
            finite: the names of tensors that must be finite, such as "model.0.weight", the same on
                all ranks: see `Retention`. An `outlast.Job` names its parameters.
            place: where in its data the training is, in words: as the step, the same on all ranks.

        Raises:
            TypeError: if `step` is not an integer (NumPy's are), `metric` is not a number, or
                `state_dict` is not a dict.
            ValueError: if `step` is negative, or is being saved already.
            CheckpointTimeout: if it cannot begin within `timeout`, because the disk or another rank
                does not respond; names what it waited for.
            CheckpointError: if something cannot be saved (names it), or if an earlier save failed;
                in the latter case this one is in progress anyway. `UnevenRanks` if that was because
                of ranks that save different steps.
        """
        self._check_open()
        step = as_int("step", step, at_least=0)
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, not a {type(state_dict).__name__}")
        number = None if metric is None else as_number("metric", metric)
        handle = self.saves.save(step, state_dict, number, finite, place)
        if not self._alone:  # its steps are none of the training: see `elastic.states`
            report_step(step)
        return handle

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
        """Loads the newest valid checkpoint into `state_dict`, in place. All ranks call this.

        A snapshot that is still in memory is used if all ranks have it and no checkpoint on
        storage is newer. A checkpoint that is incomplete or damaged is skipped in favor of the
        one before, with a warning in the log and an event. Tensors are filled in place, resharded
        as needed; other values are replaced; an empty dict or list is filled with all that the
        checkpoint has under its name.

        Args:
            state_dict: the state to load into.
            step: load this step only.
            strict: whether names that only one of `state_dict` and checkpoint has are an error.
            optional: prefixes of names that may be missing on one side even so. A value that the
                checkpoint lacks stays as it is.
            weights_only: `False` unpickles any value, which may run code: only for checkpoints of
                other programs that you trust.

        Returns:
            The step that was loaded; `None` if there is no checkpoint at all.

        Raises:
            CheckpointMismatch: if the checkpoint does not fit; names keys, shapes and dtypes.
            CheckpointReadError: if one cannot be read now, and may be valid; names the rank, the
                host, the file and the error. No older one is loaded instead.
            CheckpointError: if there are checkpoints but none is valid; names what is wrong with
                each. When none is valid, tensors may hold parts of a damaged checkpoint, and
                must not be used for training.
        """
        self._check_open()
        step = None if step is None else as_int("step", step, at_least=0)
        with self.ranks.operation():
            self.saves.seal_all()
            found = self.restorer.restore(state_dict, step, strict, tuple(optional), weights_only)
        self.saves.prepare(lambda: state_dict)
        if found is not None and self.resumes_saves:
            self.saves.resume_left(self.restorer.take_left(found))
        return found

    def checkpoints(self) -> list[CheckpointInfo]:
        """The committed checkpoints, oldest first. Reads only their manifests."""
        return folders.list_checkpoints(self.session.storage)

    def verify(self, step: int) -> CheckpointInfo:
        """Reads and verifies the whole checkpoint of `step`, on this rank.

        Raises:
            CheckpointError: if it is damaged; names the file and what is wrong with it.
        """
        return folders.verify(self.session.storage, as_int("step", step, at_least=0))

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of `step`. Call it on one rank, and not for a step that is being
        saved.

        Raises:
            CheckpointError: if there is none.
        """
        self._check_open()
        folders.delete(self.session.storage, as_int("step", step, at_least=0))

    @property
    def in_use(self) -> bool:
        """Whether it can save: it was neither closed nor aborted, and the iteration of a restart in
        place that made it, if any, is not over.
        """
        return not self._closed and self._restarts == restart_count()

    # ------------------------------------------------------------------------------ ending

    def wait(self, timeout: Duration | None = None) -> None:
        """Waits until all saves have ended.

        Raises:
            CheckpointError: the error of the first save that failed.
            TimeoutError: the built-in one, if it takes longer than `timeout`.
        """
        limit = as_wait("timeout", timeout)
        self.saves.wait(None if limit is None else limit.total_seconds())

    def abort(self) -> None:
        """Drops all saves in progress, on all ranks; does not wait. The checkpointer cannot be used
        afterwards, but the next one for this folder in this process takes over its buffers, its
        writer and its snapshots.
        """
        if not self._closed:
            self._drop()

    def close(self, timeout: Duration | None = None) -> None:
        """Waits for the saves in progress, and releases all resources. Also called at the end of a
        `with` block, and at the end of the program, where it waits for at most ten minutes.

        Args:
            timeout: how long to wait; saves not committed by then are dropped, on all ranks.

        Raises:
            CheckpointError: if a save failed or was dropped, and its handle was not read.
            RuntimeError: in a callback of a handle, which would wait for its own thread.
        """
        if self._closed:
            return
        self.saves.check_not_in_callback()
        limit = as_wait("timeout", timeout)
        self.saves.seal_all()
        in_time = self.saves.finish(None if limit is None else limit.total_seconds())
        late = [save.step for save in self.saves.pending]
        if not in_time:
            self.saves.abort()
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self.session.close(5.0 if in_time else 0.0)
        self.session.owner = None
        if late:
            raise SaveCancelled(f"steps {late} were not committed within {limit}, and dropped")
        self.saves.outcomes.raise_unseen()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif (self.world_size == 1 and issubclass(kind, Exception | SystemExit)) or (
            # A rank that was told to stop has waited for its last save; only removals are left.
            issubclass(kind, SystemExit) and not self.saves.pending
        ):
            self._close_and_log(_FOR_FAULT)  # the caller must see the error that left the block
        else:
            # A rank that will be restarted must not wait: other ranks may never finish their saves.
            self.abort()

    # ----------------------------------------------------------------------------- private

    def _close_and_log(self, limit: datetime.timedelta) -> None:
        """Closes; logs an error that can be raised nowhere, unless it is in the log already. The
        saves of an iteration that a fault has ended are dropped: its store is going away, and
        other ranks may never finish theirs.
        """
        if self.world_size > 1 and self._restarts != restart_count():
            self.abort()
            return
        try:
            self.close(limit)
        except CheckpointError as e:
            if is_due_to_restart(e):  # the end of another rank is no failure of the save
                log.warning("%s", e)

    def _close_at_exit(self) -> None:
        if self.session.outlives_program:
            self.abort()
        else:
            self._close_and_log(_FOR_EXIT)

    def _drop(self) -> None:
        self._closed = True
        self.saves.abort()
        atexit.unregister(self._close_at_exit)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"this Checkpointer for {self._url} is closed: create a new one")

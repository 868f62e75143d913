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
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from outlast.async_checkpoint import folder as folders
from outlast.async_checkpoint.copying import Copy, Guard, copy_now, owned_by
from outlast.async_checkpoint.engine import Slot, engine_for
from outlast.async_checkpoint.environment import ranks
from outlast.async_checkpoint.exchange import Catalog, Exchange
from outlast.async_checkpoint.folder import CheckpointInfo
from outlast.async_checkpoint.handle import SaveHandle
from outlast.async_checkpoint.ledger import connect_ledger
from outlast.async_checkpoint.manifest import Manifest
from outlast.async_checkpoint.plan import describe, walk
from outlast.async_checkpoint.policy import FailurePolicy
from outlast.async_checkpoint.restoring import Restorer
from outlast.async_checkpoint.retention import Retention
from outlast.async_checkpoint.saving import Save, Saver
from outlast.async_checkpoint.snapshot import Structure, values_file
from outlast.async_checkpoint.writing import Dropped
from outlast.errors import CheckpointError, StoreError
from outlast.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointRemoved,
    Emitter,
    Event,
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
        # One name for one folder: two engines on it would not know of each other.
        self._url = given if "://" in given else str(Path(given).expanduser().resolve())
        self._keep = keep if keep is not None else Retention()
        self._optimizers = [overlap] if isinstance(overlap, Optimizer) else list(overlap)
        self._policy = on_failure if isinstance(on_failure, FailurePolicy) else None
        self._failures = 0
        self._timeout = timeout.total_seconds()
        if ranks() > 1 and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"there are {ranks()} ranks (WORLD_SIZE), and no process group: make that first "
                "(torch.distributed.init_process_group), the checkpointer needs it"
            )
        ledger = connect_ledger("checkpoint", group)
        self.rank, self.world_size = ledger.rank, ledger.world_size
        self._job = ledger.agree("job", uuid.uuid4().hex[:12])
        self._engine, taken_over = engine_for(
            self._url, threads=threads, linger_s=linger.total_seconds()
        )
        if taken_over:
            self._take_over()
        self._engine.resize(max_in_flight)
        self._emitter = Emitter(events if events is not None else self._engine.sink(self.rank))
        self._emitter.place(rank=self.rank)
        self._restorer = Restorer(
            self._engine, connect_ledger("restore", group), group, self._timeout, self._emitter
        )
        try:
            self._restorer.open(self._owner_name())
        except BaseException:
            if not taken_over:  # nobody else knows of it
                self._engine.close(0.0)
            raise
        self._exchange = Exchange(connect_ledger("structure", group), self._timeout)
        self._saver = Saver(
            self._engine, ledger, self._exchange, self._committed, self._ended, self._timeout
        )
        self._signature: list[Any] = []
        self._structure: Structure | None = None
        self._saves = 0
        self._unseen: list[SaveHandle] = []
        self._closed = False
        self._at_exit = _close_at_exit(self)
        self._engine.owner = weakref.ref(self)

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
        began = self._emitter.clock.now()
        self._check_open()
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} is no number from 0 on")
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"state_dict is a {type(state_dict).__name__}, not a dict")
        self._seal_all()  # the thread that trains is here: nothing is being written to
        index, self._saves = self._saves, self._saves + 1
        found: list[Any] = []
        leaves: list[Any] = []
        try:
            # Other ranks may see it ended: so it counts as a save, that fails for all.
            if any(save.step == step for save in self._saver.pending):
                raise ValueError(f"step {step} is being saved already: wait for its handle")
            walk(state_dict, found, leaves)
            structure, catalog, changed = self._structure_of(index, state_dict, found)
            slot = self._engine.take(structure)
            try:
                save = self._snapshot(index, step, metric, state_dict, leaves, structure, slot)
            except BaseException:
                self._engine.give_back(slot)
                raise
        except Exception as e:
            self._refuse(index, step, e)
            raise
        save.changed, save.catalog = changed, catalog
        save.began = began
        save.blocked_s = self._emitter.clock.now() - began
        self._unseen.append(save.handle)
        self._saver.add(save)
        # Last: other ranks may hear of it later, and the saves of all ranks stay in step.
        self._raise_unseen()
        return save.handle

    def _refuse(self, index: int, step: int, error: Exception) -> None:
        """Tells the other ranks, which would wait, that there is nothing to save on this one."""
        # If the store is out of reach, theirs is too; the error of this rank comes first.
        with contextlib.suppress(StoreError):
            self._exchange.refuse(index, str(error))
            self._saver.refuse(index, step, error)

    def _structure_of(
        self, index: int, state_dict: Mapping[str, Any], found: list[Any]
    ) -> tuple[Structure, Catalog | None, bool]:
        if self._structure is not None and found == self._signature:
            return self._structure, self._exchange.alone, False
        self._structure, catalog = self._exchange.changed(index, describe(state_dict))
        self._structure.number(state_dict)
        self._signature = found
        return self._structure, catalog, True

    def _snapshot(
        self,
        index: int,
        step: int,
        metric: float | None,
        state_dict: Mapping[str, Any],
        leaves: list[Any],
        structure: Structure,
        slot: Slot,
    ) -> Save:
        copies = list(zip(structure.sources(leaves), slot.targets, strict=True))
        values, places = structure.pickle_values(state_dict)
        later, now = self._split(copies)
        save_id = f"{self._job}{index:08x}"
        working, final = self._engine.storage.names_for(step, save_id)
        snapshot = {
            "step": step,
            "number": index,
            "save_id": save_id,
            "folder_id": self._engine.identity,
            "rank": self.rank,
            "world_size": self.world_size,
            "working": working,
            "final": final,
            "layout": structure.layout.files,
            "values": values_file(self.rank) if values else "",
            "places": places,
            "socket": str(self._engine.socket_path(self.rank, self.world_size)),
        }
        handle = SaveHandle(step, lambda: save.guard.seal() if save.guard is not None else None)
        save = Save(index, step, metric, handle, slot, snapshot, values, places, False, None)
        save.turn = slot.turn

        def sealed(error: CheckpointError | None) -> None:
            save.torn = error
            if error is None:
                slot.snapshot, slot.values = snapshot, values
                self._engine.writer.tell(
                    {"op": "sealed", "arena": slot.number, "snapshot": snapshot}, values
                )
            save.sealed.set()

        self._engine.writer.start()
        if later:
            save.guard = slot.guard = Guard(later, self._optimizers, sealed)
            save.guard.start()
            copy_now(now)
        else:
            copy_now(now)
            sealed(None)
        self._engine.forget_inherited()
        return save

    def _split(self, copies: list[Copy]) -> tuple[list[Copy], list[Copy]]:
        if not self._optimizers:
            return [], copies
        owned = owned_by(self._optimizers)
        later: list[Copy] = []
        now: list[Copy] = []
        for source, to in copies:
            overlaps = (
                source.data_ptr() in owned
                and source.is_contiguous()
                and source.device.type == "cpu"
                and not source.is_inference()
            )
            (later if overlaps else now).append((source, to))
        return later, now

    def _prepare(self, state_dict: Mapping[str, Any]) -> None:
        """What is restored will be saved: so who saves what is agreed now, and memory allocated."""
        if self._saves:
            return
        index, self._saves = self._saves, self._saves + 1
        found: list[Any] = []
        try:
            walk(state_dict, found, [])
            structure, _, _ = self._structure_of(index, state_dict, found)
        except (CheckpointError, ValueError) as e:
            # The same error comes from the first save, where it belongs.
            log.debug("nothing was prepared for saves: %s", e)
            with contextlib.suppress(StoreError):
                self._exchange.refuse(index, str(e))
        else:
            self._engine.prepare(structure)

    def _seal_all(self) -> None:
        for save in self._saver.pending:
            if save.guard is not None:
                save.guard.seal()

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
        self._seal_all()
        found = self._restorer.restore(state_dict, step, strict, tuple(optional), weights_only)
        self._prepare(state_dict)
        return found

    def list(self) -> list[CheckpointInfo]:
        """The committed checkpoints, oldest first. Only their manifests are read."""
        return folders.list_checkpoints(self._engine.storage)

    def verify(self, step: int) -> CheckpointInfo:
        """Reads the checkpoint of `step` whole, on this rank.

        Raises:
            CheckpointError: naming the file and what is wrong with it.
        """
        return folders.verify(self._engine.storage, step)

    def delete(self, step: int) -> None:
        """Deletes the checkpoint of `step`. To be called on one rank, and for no step that is
        being saved.

        Raises:
            CheckpointError: if there is none.
        """
        self._check_open()
        folders.delete(self._engine.storage, step)

    # ------------------------------------------------------------------------------ ending

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Waits until all saves have ended.

        Raises:
            CheckpointError: of the first one that failed.
            TimeoutError: when it takes longer than `timeout`.
        """
        began = time.monotonic()
        for save in self._saver.pending:
            spent = datetime.timedelta(seconds=time.monotonic() - began)
            save.handle.wait(None if timeout is None else max(timeout - spent, _NOTHING))
        self._raise_unseen()

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
        self._seal_all()
        in_time = self._saver.finish(None if timeout is None else timeout.total_seconds())
        late = [save.step for save in self._saver.pending]
        if not in_time:
            self._saver.abort()
        self._closed = True
        self._at_exit()
        self._engine.close(5.0 if in_time else 0.0)
        if late:
            raise CheckpointError(f"steps {late} were not committed within {timeout}, and dropped")
        self._raise_unseen()

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
        before = self._engine.owner() if self._engine.owner is not None else None
        if before is not None:
            before._drop()  # also if it was aborted: an interrupt may have cut that short
            # A restart must not wait for a disk that is slow to make durable what is dropped.
            self._engine.writer.free(_FOR_WRITER_S)
        self._engine.give_back_all()

    def _drop(self) -> None:
        self._closed = True
        self._saver.abort()
        self._at_exit()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this checkpointer is closed")

    def _raise_unseen(self) -> None:
        unseen = [handle for handle in self._unseen if handle.unseen_error is not None]
        self._unseen = [handle for handle in self._unseen if not handle.done]
        for handle in unseen:
            error = handle.exception
            assert error is not None
            if self._policy is None or self._failures > self._policy.max_in_a_row:
                raise error

    def _committed(self, manifest: Manifest) -> None:
        """On rank 0, in the thread of the saves."""
        if self._keep.keeps_all:
            return
        try:
            removable = self._keep.removable(self.list(), manifest.step)
            if removable:
                names = [info.folder for info in removable]
                self._engine.writer.request({"op": "remove", "folders": names})
        except (CheckpointError, OSError, Dropped):
            # The save is committed: what stays too long does no harm, but somebody must look.
            log.warning("old checkpoints could not be removed", exc_info=True)
        else:
            for info in removable:
                self._emitter.emit(CheckpointRemoved(step=info.step))

    def _ended(self, save: Save, size_bytes: int, error: Exception | None) -> None:
        self._failures = 0 if error is None else self._failures + 1
        seconds = self._emitter.clock.now() - save.began
        queued = len(self._saver.pending)
        if error is None:
            event: Event = CheckpointCommitted(
                step=save.step,
                size_bytes=size_bytes,
                own_bytes=sum(size for _, _, size in save.snapshot["layout"]) + len(save.values),
                blocked_seconds=save.blocked_s,
                seconds=seconds,
                queued=queued,
            )
        else:
            event = CheckpointFailed(
                step=save.step,
                cause=str(error),
                blocked_seconds=save.blocked_s,
                seconds=seconds,
                queued=queued,
            )
            log.error("step %d was not saved: %s", save.step, error)
        self._emitter.emit(event)

    def _owner_name(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()}, job {self._job}"


def _close_at_exit(checkpointer: Checkpointer) -> Any:
    """Registers a close at the end of the program; returns what takes that back."""
    ref = weakref.ref(checkpointer)

    def close() -> None:
        alive = ref()
        if alive is not None:
            with contextlib.suppress(CheckpointError):  # it is in the log
                alive.close(_FOR_EXIT)

    atexit.register(close)
    return lambda: atexit.unregister(close)

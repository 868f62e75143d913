"""Restores: all ranks try the same candidates in the same order, and agree on each.

Rank 0 makes the list: snapshots that all ranks have in memory, and the folders on storage, the
newest step first. A candidate that is damaged on any rank is passed over by all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from outlast.async_checkpoint.restore.fit import (
    Index,
    Misfit,
    empty_dicts,
    fill_empty,
    fit,
    left_over,
    load_tensors,
    load_values,
    set_values,
)
from outlast.async_checkpoint.restore.from_memory import InMemory
from outlast.async_checkpoint.restore.verified_read import Source, StorageSource
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.state_dict.sharding import Item
from outlast.async_checkpoint.storage import directory as folders
from outlast.async_checkpoint.storage.manifest import Manifest
from outlast.async_checkpoint.storage.recycled_files import RECYCLED
from outlast.async_checkpoint.writer.client import WriterFailed
from outlast.async_checkpoint.writer.messages import DescribeSnapshots, RemoveFolders
from outlast.async_checkpoint.writer.snapshot_description import HeldSnapshot
from outlast.coordination import KeyTimeout
from outlast.coordination.call_failure import CallFailure, Verdict
from outlast.coordination.call_ledger import CallLedger
from outlast.errors import CheckpointError
from outlast.events import CheckpointPassedOver, CheckpointRestored, Emitter

__all__ = ["Restorer"]

log = logging.getLogger("outlast.checkpoint")

_MISFIT = "misfit"


class Restorer:
    """One rank's part in opening a folder and restoring from it.

    Args:
        session: of the folder.
        ledger: of its own.
        group: for sending snapshots between ranks.
        timeout_s: how long a rank waits for the others.
        emitter: for what happened.
    """

    def __init__(
        self,
        session: FolderSession,
        ledger: CallLedger,
        group: Any,
        timeout_s: float,
        emitter: Emitter,
    ) -> None:
        self._session = session
        self._ledger = ledger
        self._group = group
        self._timeout = timeout_s
        self._emitter = emitter
        self._items = session.memo.items
        self._calls = 0

    def open(self, owner: str) -> None:
        """Makes the folder, locks it, and removes what killed saves have left. On all ranks.

        Raises:
            CheckpointError: on every rank, if rank 0 cannot.
        """

        def prepare(_: list[Any]) -> dict[str, Any]:
            # All ranks are here: one that was rank 0 before has let go of the lock.
            storage = self._session.storage
            ours = self._session.locked
            if not ours:
                storage.prepare()
                storage.lock(owner)
                self._session.locked = True
            # What is spare is still of use if it is of this very process.
            left = [name for name in folders.leftovers(storage) if not ours or name != RECYCLED]
            for name in left:
                try:
                    self._session.writer.request(RemoveFolders(folders=[name]))
                except CheckpointError as e:
                    # It is in nobody's way: its name is no checkpoint's.
                    log.warning("%s, which a save has left, cannot be removed: %s", name, e)
            return {"left": left, "identity": storage.identity()}

        found = self._from_rank_0(prepare, "here")
        self._session.identity = found["identity"]
        for name in found["left"]:
            log.info("removed %s, which a save that did not end has left", name)
        rank, world_size = self._ledger.rank, self._ledger.world_size
        self._session.pool.take_over(self._session.socket_path(rank, world_size))

    def restore(
        self,
        state_dict: dict[str, Any],
        step: int | None,
        strict: bool,
        optional: tuple[str, ...],
        weights_only: bool,
    ) -> int | None:
        """See `Checkpointer.restore`."""
        mine = self._snapshots()
        candidates = self._candidates(mine, step)
        if not candidates:
            if step is not None:
                raise CheckpointError(
                    f"{self._session.storage.where} has no checkpoint of step {step}"
                )
            return None
        wrong: list[str] = []
        empty = empty_dicts(state_dict)
        self._touched: set[str] = set()
        for candidate in candidates:
            found, source = int(candidate["step"]), str(candidate["kind"])
            began = self._emitter.clock.now()
            failure = self._try(candidate, mine, state_dict, strict, optional, weights_only)
            if failure is None:
                seconds = self._emitter.clock.now() - began
                self._emitter.emit(CheckpointRestored(step=found, source=source, seconds=seconds))
                return found
            text = f"rank {failure.rank} on {failure.host}: {failure.cause}"
            if failure.name == _MISFIT:
                raise CheckpointError(text)
            wrong.append(text)
            for each in empty:
                each.clear()  # the next one may hold something else there
            log.warning("passed over the checkpoint of step %s: %s", candidate["step"], text)
            self._emitter.emit(CheckpointPassedOver(step=found, source=source, cause=failure.cause))
        raise CheckpointError(
            f"no checkpoint in {self._session.storage.where} is valid:\n  " + "\n  ".join(wrong)
        )

    # -------------------------------------------------------------------------- candidates

    def _snapshots(self) -> dict[str, HeldSnapshot]:
        """This rank's snapshots in memory, by save."""
        buffers = [*self._session.pool.buffers, *self._session.pool.handed_over]
        if not any(buffer.snapshot is not None for buffer in buffers):
            return {}
        try:
            answer = self._session.writer.request(DescribeSnapshots())
        except WriterFailed as e:  # the other ranks need not wait for what this one does not have
            log.warning("snapshots in memory are of no use, storage is: %s", e)
            return {}
        place = self._ledger.rank, self._ledger.world_size
        return {
            s["save_id"]: s
            for s in answer.snapshots
            if (s["rank"], s["world_size"]) == place
            # Of this folder as it is, and not of one that stood there before.
            and s["folder_id"] == self._session.identity
        }

    def _candidates(
        self, mine: Mapping[str, Mapping[str, Any]], step: int | None
    ) -> list[dict[str, Any]]:
        told = [
            [s["save_id"], s["step"], s["number"], s["final"] if s.get("committed") else ""]
            for s in mine.values()
        ]

        def gather(parts: list[Any]) -> list[dict[str, Any]]:
            storage = self._session.storage
            found = [
                {"kind": "storage", "step": s, "folder": name, "order": [s, 0, 0]}
                for s, name in folders.candidates(storage)
            ]
            there = {c["folder"] for c in found}
            everyone = set.intersection(*({one[0] for one in part} for part in parts))
            found += [
                {"kind": "memory", "step": s, "save_id": save_id, "order": [s, 1, number]}
                for save_id, s, number, final in parts[0]
                # One that was committed and is not there any more was deleted.
                if save_id in everyone and (not final or final in there)
            ]
            found = [c for c in found if step is None or c["step"] == step]
            return sorted(found, key=lambda c: c["order"], reverse=True)

        return list(self._from_rank_0(gather, told))

    # ----------------------------------------------------------------------------- loading

    def _try(
        self,
        candidate: Mapping[str, Any],
        mine: Mapping[str, Any],
        state_dict: dict[str, Any],
        strict: bool,
        optional: tuple[str, ...],
        weights_only: bool,
    ) -> CallFailure | None:
        found = self._found_in(candidate, mine, state_dict)
        if isinstance(found, CallFailure):
            return found
        index, sources = found
        where = sources[0][0].where
        items: list[Item] = []
        extra: list[str] = []

        def compare() -> None:
            present = self._items(state_dict)
            fitting, unexpected = fit(present, index, where, strict, optional)
            lost = self._touched & {i.name for i in present}
            lost -= {i.name for i in fitting}
            if lost:
                raise Misfit(
                    f"{where} lacks {sorted(lost)[:10]}, which now hold parts of a damaged one"
                )
            items.extend(fitting)
            extra.extend(unexpected)

        failure = self._attempt(compare)
        if failure is not None:
            return failure
        if strict:
            homeless = self._from_rank_0(_in_all, extra)
            if homeless:
                raise left_over(homeless, where)

        def load() -> None:
            self._touched.update(item.name for item in items)
            values = []
            for source, part in sources:
                values += load_values(source, part, items, weights_only)
            for source, part in sources:
                load_tensors(source, part, state_dict, items)
            set_values(state_dict, values)

        return self._attempt(load)

    def _found_in(
        self, candidate: Mapping[str, Any], mine: Mapping[str, Any], state_dict: dict[str, Any]
    ) -> tuple[Index, list[tuple[Source, Index]]] | CallFailure:
        """What the candidate holds, and the sources of it. Empty dicts are filled."""
        if candidate["kind"] == "memory":
            return self._found_in_memory(mine[candidate["save_id"]], state_dict)
        storage, name = self._session.storage, candidate["folder"]
        manifests: list[Manifest] = []
        failure = self._attempt(lambda: manifests.append(folders.read_manifest(storage, name)))
        if failure is not None:
            return failure
        manifest = manifests[0]
        index = Index(manifest.tensors, manifest.values)
        fill_empty(state_dict, index)
        source = StorageSource(storage, name, manifest.files, manifest.chunk_bytes)
        return index, [(source, index)]

    def _found_in_memory(
        self, snapshot: Mapping[str, Any], state_dict: dict[str, Any]
    ) -> tuple[Index, list[tuple[Source, Index]]] | CallFailure:
        buffers = {
            buffer.number: buffer
            for buffer in (*self._session.pool.buffers, *self._session.pool.handed_over)
        }
        buffer = buffers[snapshot["buffer"]]
        assert buffer.memory is not None
        memory = InMemory(snapshot, buffer.memory.view, buffer.values)
        # What the ranks have to tell one another comes first: one that finds a damaged byte later
        # must not leave the others waiting.
        suffices: list[bool] = []
        failure = self._attempt(lambda: suffices.append(memory.suffices(state_dict, self._items)))
        if failure is not None:
            return failure
        if self._from_rank_0(all, suffices[0]):
            source, index = memory.own()
            return index, [(source, index)]
        told = self._from_rank_0(_as_told, memory.told)
        rank = self._ledger.rank
        indexes: list[tuple[Index, list[str]]] = []
        failure = self._attempt(
            lambda: indexes.append(memory.index_for(state_dict, self._items, told, rank))
        )
        if failure is not None:
            return failure
        index, lacking = indexes[0]
        wanted = self._from_rank_0(_in_any, lacking)
        if not wanted:
            return index, [memory.own()]
        packed: list[tuple[memoryview, dict[str, Any]]] = []
        failure = self._attempt(lambda: packed.append(memory.pack(set(wanted))))
        if failure is not None:
            return failure
        content, description = packed[0]
        told = self._from_rank_0(_as_told, description)
        rooms: list[list[memoryview]] = []
        # Nobody may be missing in the collectives: what can fail comes before them.
        failure = self._attempt(lambda: rooms.append(memory.rooms(content, told, rank)))
        if failure is not None:
            return failure
        sent = memory.exchange(rooms[0], told, set(lacking), self._group)
        return index, [memory.own(), *sent]

    # -------------------------------------------------------------------------- agreement

    def _attempt(self, work: Callable[[], None]) -> CallFailure | None:
        """Does `work` on every rank; returns nothing, or the same failure of one rank on all."""
        index = self._next()
        try:
            work()
        except Misfit as e:
            failure = CallFailure.here(index, _MISFIT, self._ledger.rank, str(e))
            self._ledger.fail(index, failure)
        except (CheckpointError, OSError) as e:
            self._ledger.fail(index, CallFailure.here(index, "", self._ledger.rank, str(e)))
        except BaseException as e:
            self._ledger.fail(index, CallFailure.of(e, index, _MISFIT, self._ledger.rank))
            raise
        else:
            self._ledger.finish(index)
        verdict: Verdict = self._await(lambda: self._ledger.await_verdict(index, self._timeout))
        self._ledger.forget(index)
        return verdict.failure

    def _from_rank_0(self, work: Callable[..., Any], part: Any = None) -> Any:
        """What `work` returns on rank 0, on every rank; it is given what all ranks say."""
        ledger, index = self._ledger, self._next()
        if ledger.world_size == 1:
            try:
                return work() if part is None else work([part])
            except OSError as e:
                raise CheckpointError(f"rank 0: {e}") from e
        if part is not None:
            ledger.finish(index, json.dumps(part).encode())
        if ledger.rank == 0:
            try:
                if part is None:
                    answer = {"is": work()}
                else:
                    self._await(lambda: ledger.await_verdict(index, self._timeout))
                    answer = {"is": work([json.loads(said) for said in ledger.parts(index)])}
            except (CheckpointError, OSError) as e:
                answer = {"error": f"rank 0: {e}"}
            ledger.conclude(index, json.dumps(answer).encode())
        said = json.loads(self._await(lambda: ledger.await_conclusion(index, self._timeout)))
        ledger.forget(index)
        if "error" in said:
            raise CheckpointError(said["error"])
        return said["is"]

    def _await(self, wait: Callable[[], Any]) -> Any:
        try:
            return wait()
        except KeyTimeout as e:
            raise CheckpointError(
                f"rank {self._ledger.rank} waits for the other ranks at the checkpointer of "
                f"{self._session.url}; not all came within {self._timeout:g} s"
            ) from e

    def _next(self) -> int:
        self._calls += 1
        return self._calls


def _in_all(lists: list[list[str]]) -> list[str]:
    return sorted(set.intersection(*(set(names) for names in lists)))


def _in_any(lists: list[list[str]]) -> list[str]:
    return sorted(set().union(*lists))


def _as_told(parts: list[Any]) -> list[Any]:
    return parts

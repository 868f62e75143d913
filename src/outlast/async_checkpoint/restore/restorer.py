"""Restores: all ranks try the same candidates in the same order, and agree on each.

Rank 0 lists the candidates: snapshots that each rank has in memory or can fetch from another
host's, and checkpoints on storage, the newest step first. All skip one that is damaged on any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from outlast.async_checkpoint.environment import host_name, may_have_other_hosts
from outlast.async_checkpoint.observers import notify
from outlast.async_checkpoint.restore.fit import (
    Content,
    check_mixture,
    empty_in,
    fill_empty,
    fit,
    left_over,
)
from outlast.async_checkpoint.restore.from_copies import CopiesInReach, Fetched, plans
from outlast.async_checkpoint.restore.from_memory import MemorySnapshot, content_in_memory
from outlast.async_checkpoint.restore.load import Batch, batches, load, load_values
from outlast.async_checkpoint.restore.shared_read import (
    Plan,
    SharedRead,
    broadcasts,
    plan_of,
    sharers,
)
from outlast.async_checkpoint.restore.verified_read import check_sizes, storage_source
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.save.left_saves import LeftSave, compared, left_by
from outlast.async_checkpoint.snapshot.plan import Item
from outlast.async_checkpoint.storage.directory import candidates, read_manifest
from outlast.async_checkpoint.storage.manifest import saved_by
from outlast.async_checkpoint.writer.client import ProcessFailed
from outlast.async_checkpoint.writer.handover import SnapshotDescription
from outlast.async_checkpoint.writer.main import Writer
from outlast.coordination.agreement import MISFIT, UNREAD, Agreement
from outlast.coordination.call_ledger import CallFailure
from outlast.errors import CheckpointError, CheckpointMismatch, CheckpointReadError
from outlast.events.emitter import Emitter
from outlast.events.types import CheckpointPassedOver, CheckpointRestored, NothingToRestore
from outlast.system.notices import notice
from outlast.system.units import duration_text, listed

log = logging.getLogger("outlast.checkpoint")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What a restore may load. `name` is a directory on storage, or the id of a save in memory;
    `fetches` says from where each rank (as text) that lacks its snapshot fetches a copy.
    """

    source: str  # "storage", "memory" or "copies"
    step: int
    name: str
    fetches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    number: int = 0  # of the save, in memory

    @property
    def order(self) -> tuple[int, bool, int]:
        """The best is the greatest: memory before storage, and in memory the later save."""
        return self.step, self.source != "storage", self.number


@dataclasses.dataclass(frozen=True)
class Found:
    """What rank 0 has found for all ranks: the candidates, the best first, unless a rank has not
    told of all its snapshots; saves that were cut off; whether all save the same shares as before.
    """

    candidates: list[Candidate]
    is_all: bool
    left: list[LeftSave]
    goes_on: bool


@dataclasses.dataclass
class _Request:
    """A restore in progress. `empty` are the dicts and lists that were empty before. `overwritten`
    are the names of tensors that may hold parts of a damaged candidate. `fetched` is the copy that
    was fetched for the candidate.
    """

    state_dict: dict[str, Any]
    strict: bool
    optional: tuple[str, ...]
    weights_only: bool
    empty: list[Any]
    overwritten: set[str] = dataclasses.field(default_factory=set)
    fetched: Fetched = dataclasses.field(default_factory=Fetched)


class _Compared(NamedTuple):
    """What a candidate has for this rank, and the reads of it, with their plan if it is shared."""

    content: Content
    items: list[Item]
    unexpected: list[str]
    reads: deque[Batch]
    plan: Plan
    digest: str


class Restorer:
    """One rank's part in restoring from a directory of checkpoints.

    Attributes:
        ranks: the agreement of the ranks, also for steps between restores.
        copies: the copies in other hosts' memory, if there are any.
        restored_from: the source of the last restore; empty if it found nothing.
        lacking: the paths of what the last restore has not found in the checkpoint.
        not_live: why the caller restores no state that it has kept; empty if it has none.
    """

    def __init__(
        self, session: FolderSession, ranks: Agreement, group: Any, emitter: Emitter
    ) -> None:
        self._session, self.ranks, self._group, self._emitter = session, ranks, group, emitter
        self.copies: CopiesInReach | None = None
        self.restored_from = self.not_live = ""
        self.lacking: list[tuple[Any, ...]] = []
        self._left: list[LeftSave] = []
        self._snapshots: dict[str, SnapshotDescription] = {}
        self._looked: tuple[int | None, list[Candidate]] | None = None

    def _items(self, state_dict: Mapping[str, Any]) -> list[Item]:
        found = self._session.memo.items(state_dict)
        return [item for item in found if item.kind != "container"]

    def restore(
        self,
        state_dict: dict[str, Any],
        step: int | None,
        strict: bool = True,
        optional: tuple[str, ...] = (),
        weights_only: bool = True,
    ) -> int | None:
        if self._looked is None or self._looked[0] != step:
            with self.ranks.operation():
                self.looked(self.ranks.gather(self.held(), partial(self.sort, step)), step)
        assert self._looked is not None
        (_, found), self._looked, snapshots = self._looked, None, self._snapshots
        where = self._session.storage.where
        if not found:
            if step is not None:
                raise CheckpointError(f"{where} has no checkpoint of step {step}")
            self._emitter.emit(NothingToRestore())
            self.restored_from = ""
            return None
        errors: list[str] = []
        empty = empty_in(state_dict)
        request = _Request(state_dict, strict, optional, weights_only, empty)
        notify("restoring")
        for candidate in found:
            began = self._emitter.clock.now()
            failure = self._load(candidate, snapshots, request)
            if failure is None:
                self._restored(candidate, request.fetched, self._emitter.clock.now() - began)
                return candidate.step
            text = f"rank {failure.rank} on {failure.host}: {failure.cause}"
            for each in empty:
                each.clear()  # the next candidate may fill it differently
            if failure.name == MISFIT:
                raise self.ranks.attributed(CheckpointMismatch(text), failure.rank)
            if failure.name == UNREAD:
                raise self.ranks.attributed(CheckpointReadError(text), failure.rank)
            errors.append(text)
            log.warning("passed over the checkpoint of step %s: %s", candidate.step, text)
            self._emitter.emit(
                CheckpointPassedOver(
                    step=candidate.step, source=candidate.source, cause=failure.cause
                )
            )
        raise CheckpointError(f"no checkpoint in {where} is valid:\n  " + "\n  ".join(errors))

    def _restored(self, candidate: Candidate, fetched: Fetched, seconds: float) -> None:
        source = self.restored_from = candidate.source
        self._emitter.emit(
            CheckpointRestored(
                step=candidate.step,
                source=source,
                seconds=seconds,
                fetched_bytes=fetched.size_bytes,
                held_by=fetched.held_by,
                not_live=self.not_live,
            )
        )
        if self.copies is not None:
            self.copies.restored("" if source == "storage" else candidate.name)
        if self.ranks.rank == 0:
            place = "memory and copies on other hosts" if source == "copies" else source
            notice(
                log, "restored step %d from %s in %s", candidate.step, place, duration_text(seconds)
            )

    def snapshots(self, after: int) -> dict[str, SnapshotDescription]:
        """This rank's snapshots in memory, by the ids of their saves."""
        held = [each.snapshot for each in self._session.pool.all_buffers]
        if not any(each is not None and each["step"] > after for each in held):
            return {}
        try:
            answer = self._session.writer.request(Writer.describe_snapshots)
        except ProcessFailed as e:  # the other ranks must not wait for this one's snapshots
            log.warning("snapshots in memory cannot be used, storage can: %s", e)
            return {}
        place = self.ranks.rank, self.ranks.world_size
        return {
            s["save_id"]: s
            for s in answer
            if (s["rank"], s["world_size"]) == place
            # Not from a removed directory of the same name.
            and s["folder_id"] == self._session.identity
        }

    def held(self, after: int = -1) -> Any:
        """What this rank has in memory, for `sort`: plain JSON. The writer is not asked, and takes
        no checksums, unless there is a snapshot of a later step than `after`.
        """
        copies, place = self.copies, (self.ranks.rank, self.ranks.world_size)
        snapshots = self._snapshots = self.snapshots(after)
        return {
            "after": after,
            "share": self._session.memo.last_share(),
            "own": {save_id: [s["step"], s["number"]] for save_id, s in snapshots.items()},
            "committed": {i: s["final"] for i, s in snapshots.items() if s.get("committed")},
            "copies": [] if copies is None else [copies.listed(self.ranks.world_size)],
            "left": [dataclasses.asdict(each) for each in left_by(self._session, *place)],
        }

    def sort(self, step: int | None, parts: list[Any]) -> Any:
        """On rank 0: what it has `Found` from the parts of all ranks, as JSON, for `looked`."""
        on_storage = candidates(self._session.storage)
        folders = {folder for _, folder in on_storage}
        final = {save_id: name for part in parts for save_id, name in part["committed"].items()}
        listed = [each for part in parts for each in part["copies"]]
        in_memory = plans([part["own"] for part in parts], listed)
        found = [Candidate("storage", s, folder) for s, folder in on_storage]
        found += [
            Candidate("copies" if fetches else "memory", s, save_id, fetches, number)
            for save_id, (s, number, fetches) in in_memory.items()
            # A snapshot that was committed and is no longer on storage has been deleted.
            if save_id not in final or final[save_id] in folders
        ]
        found = [each for each in found if step is None or each.step == step]
        return dataclasses.asdict(
            Found(
                sorted(found, key=lambda each: each.order, reverse=True),
                all(part["after"] < 0 for part in parts),
                compared([part["left"] for part in parts], partial(self._has_saved, on_storage)),
                self._session.memo.all_go_on([part["share"] for part in parts]),
            )
        )

    def looked(self, answer: Any, step: int | None) -> int | None:
        """Notes what `sort` has found: a restore of `step` that follows tries that. Returns the
        step of the best candidate; it may turn out to be damaged.
        """
        found = msgspec.convert(answer, Found)
        self._left += found.left
        self._session.memo.goes_on = found.goes_on
        self._looked = (step, found.candidates) if found.is_all else None
        return found.candidates[0].step if found.candidates else None

    def has_none(self, step: int | None) -> bool:
        """Whether `looked` has noted that a restore of `step` has no candidate."""
        return self._looked == (step, [])

    def newest(self, after: int, step: int | None = None) -> int | None:
        """The step of the newest checkpoint after `after`, or `step` if there is that one; in a
        round of its own. All ranks call this.
        """
        with self.ranks.operation():
            answer = self.ranks.gather(self.held(after), partial(self.sort, step))
        newest = self.looked(answer, step)
        self._looked = None
        return newest if newest is not None and newest > after else None

    def restored_elsewhere(self, step: int, source: str, seconds: float, size_bytes: int) -> None:
        """A caller has restored a state from another `source`; `size_bytes` were received from
        other ranks. A later restore looks again, since there may be other checkpoints.
        """
        self.restored_from, self._looked = source, None
        self._emitter.emit(
            CheckpointRestored(step=step, source=source, seconds=seconds, fetched_bytes=size_bytes)
        )

    def _has_saved(self, found: Sequence[tuple[int, str]], step: int, save_id: str) -> bool:
        storage = self._session.storage
        folders = [folder for each, folder in found if each == step]
        with contextlib.suppress(CheckpointError, OSError):
            return any(saved_by(storage, folder) == save_id for folder in folders)
        return False

    def take_left(self, step: int) -> list[LeftSave]:
        """The saves up to this step that were in progress before the restart; once."""
        left, self._left = self._left, []
        return [each for each in left if each.step <= step]

    def _load(
        self, candidate: Candidate, snapshots: dict[str, SnapshotDescription], request: _Request
    ) -> CallFailure | None:
        """Loads one candidate. Returns `None`, or the failure of one rank, the same on all."""
        state_dict, request.fetched = request.state_dict, Fetched()
        if candidate.fetches:
            fetched = self.ranks.attempt(lambda: self._fetch(candidate, snapshots))
            if isinstance(fetched, CallFailure):
                return fetched
            request.fetched = fetched
        content: Content | None = None
        if candidate.source != "storage":
            memory = self._memory_of(snapshots[candidate.name])
            held = content_in_memory(memory, state_dict, self._items, self.ranks, self._group)
            if isinstance(held, CallFailure):
                return held
            content = held
        # Ranks share what they read of storage, unless they have the page cache of one host.
        is_cached = self._session.storage.is_cached
        by_storage = content is None and self.ranks.world_size > 1
        shares = by_storage and (may_have_other_hosts() or not is_cached)

        def compare() -> tuple[_Compared, Any]:
            of = content or self._content_on_storage(candidate, state_dict)
            found = self._compare(of, request, shares=shares)
            loads = host_name(), found.digest
            return found, {"unexpected": found.unexpected, "loads": loads, "shares": shares}

        def together(parts: list[Any]) -> Any:
            missing = set.intersection(*(set(each["unexpected"]) for each in parts))
            if not by_storage or not all(each["shares"] for each in parts):
                return sorted(missing), {}
            loads, only_all = [each["loads"] for each in parts], broadcasts(self._group)
            return sorted(missing), sharers(loads, is_cached=is_cached, only_all=only_all)

        compared = self.ranks.attempt_and_gather(compare, together)
        if isinstance(compared, CallFailure):
            return compared
        found, (missing, by_digest) = compared
        if missing and request.strict:
            raise left_over(missing, found.content.where)
        request.overwritten.update(item.name for item in found.items)
        values_of = partial(
            load_values, found.content, state_dict, found.items, request.weights_only
        )
        if not (hosts := by_digest.get(found.digest, [])):
            return self.ranks.attempt(lambda: load(found.reads, state_dict, values_of()))
        values = self.ranks.attempt(values_of)
        if isinstance(values, CallFailure):
            return values
        shared = SharedRead(hosts, found.plan, self.ranks, self._group)
        # Each rank has its values: none waits for the chunks of one that has not.
        work = partial(load, found.reads, state_dict, values)
        source = found.content.sources[0]
        is_whole = self.ranks.attempt_and_gather(lambda: (None, shared.load(source, work)), all)
        if isinstance(is_whole, CallFailure):
            return is_whole
        if not is_whole[1]:
            raise CheckpointReadError(f"not all of {found.content.where} has arrived on each rank")
        return None

    def _fetch(self, candidate: Candidate, snapshots: dict[str, SnapshotDescription]) -> Fetched:
        at = candidate.fetches.get(str(self.ranks.rank))
        if at is None:
            return Fetched()
        assert self.copies is not None
        snapshots[candidate.name], fetched = self.copies.fetch(candidate.name, at)
        return fetched

    def _content_on_storage(self, candidate: Candidate, state_dict: dict[str, Any]) -> Content:
        storage = self._session.storage
        manifest = read_manifest(storage, candidate.name)
        source = storage_source(storage, candidate.name, manifest)
        fill_empty(state_dict, manifest, partial(check_sizes, source))
        return Content(manifest, [source])

    def _memory_of(self, snapshot: SnapshotDescription) -> MemorySnapshot:
        buffers = self._session.pool.all_buffers
        (buffer,) = (each for each in buffers if each.number == snapshot["buffer"])
        assert buffer.memory is not None
        return MemorySnapshot(snapshot, buffer.memory, buffer.values)

    def _compare(self, content: Content, request: _Request, *, shares: bool) -> _Compared:
        present = self._items(request.state_dict)
        check_mixture(request.state_dict, present, request.empty, content)
        items, unexpected = fit(present, content, request.strict, request.optional)
        loaded = {item.name for item in items}
        self.lacking = [item.path for item in present if item.name not in loaded]
        lost = request.overwritten & {item.name for item in present}
        lost -= {item.name for item in items}
        if lost:
            raise CheckpointMismatch(
                f"{content.where} lacks {sorted(lost)[:10]}, which now hold parts of a damaged one"
            )
        held = {name for each in content.sources for name in each.contents.entries}
        if unread := sorted(loaded - held):  # never left as they are, without a word
            raise CheckpointError(f"{content.where} has {listed(unread, 10)}, which no source has")
        reads = deque(batches(content, request.state_dict, items))
        return _Compared(content, items, unexpected, reads, *plan_of(reads if shares else ()))

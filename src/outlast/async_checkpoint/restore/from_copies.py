"""Restores from copies of snapshots in other hosts' memory: which there are, how to fetch them.

A snapshot is a candidate if each rank has its own part, or some keeper holds a copy of it. The
ranks that lack theirs fetch the copies; from then on they have them, as if never lost.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from outlast.async_checkpoint.peer_copies.arrangement import Arrangement, Place, holders
from outlast.async_checkpoint.peer_copies.keeper import Keeper
from outlast.async_checkpoint.peer_copies.rounds import CopyRounds
from outlast.async_checkpoint.peer_copies.transfer import fetch_copy
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.writer.handover import SnapshotDescription
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.errors import CheckpointError
from outlast.events.emitter import Emitter
from outlast.events.types import CopySkipped

log = logging.getLogger("outlast.checkpoint")


@dataclasses.dataclass(frozen=True)
class Fetched:
    """How many bytes this rank has fetched, and from which host."""

    size_bytes: int = 0
    held_by: str = ""


class CopiesInReach:
    """One rank's view of the copies; `Arrangement` says how to reach them."""

    def __init__(self, session: FolderSession, arrangement: Arrangement, rank: int) -> None:
        self._session, self._arrangement, self._rank = session, arrangement, rank

    def listed(self, world_size: int) -> dict[str, Any]:
        """The copies that this rank's keeper holds, as JSON for `plans`."""
        arrangement, keeper = self._arrangement, self._arrangement.keeper
        try:
            port = keeper.port()
            copies = keeper.request(Keeper.describe_copies)
        except CheckpointError as e:  # the other ranks must not wait for this one's list
            log.warning("copies in this rank's memory cannot be used, storage can: %s", e)
            return {"at": None, "copies": []}
        return {
            "at": [arrangement.address, port, arrangement.hosts[self._rank]],
            "copies": [
                [copy["save_id"], copy["rank"], copy["step"], copy["number"]]
                for copy in copies
                if copy["world_size"] == world_size
                # Not from a removed directory of the same name.
                and copy["folder_id"] == self._session.identity
            ],
        }

    def fetch(self, save_id: str, at: Sequence[Any]) -> tuple[SnapshotDescription, Fetched]:
        """Fetches the copy of this rank's snapshot of a save, verifies it, and adopts it."""
        address, port, host = at
        token = self._arrangement.token
        copy = fetch_copy(host, (address, port), token, save_id, self._rank)
        place = self._session.socket_path(self._rank, copy.description["world_size"])
        # Only the path of this host: the other one says what its own was.
        copy.description["socket"] = str(place)
        copy.description["buffer"] = self._session.pool.adopt(copy).number
        return copy.description, Fetched(copy.memory.size_bytes + len(copy.values), host)

    def restored(self, save_id: str) -> None:
        """After a restore: releases the copies of other saves, or all if it was from storage."""
        self._arrangement.keeper.keep_only(save_id)
        self._session.pool.overwritten_last = save_id


def plans(
    own: Sequence[Mapping[str, Any]], copies: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """By the id of each save that every rank has or can fetch: its step, its number, and from where
    each rank that lacks it fetches it. `own` is each rank's own snapshots by id (step, number),
    `copies` what each rank has `listed`.
    """
    known: dict[str, tuple[int, int]] = {}
    held: dict[str, dict[int, Any]] = {}
    for part in own:
        known.update({save_id: (step, number) for save_id, (step, number) in part.items()})
    for listed in copies:
        for save_id, rank, step, number in listed["copies"]:
            known[save_id] = (step, number)
            held.setdefault(save_id, {})[rank] = listed["at"]
    found = {}
    for save_id, (step, number) in known.items():
        lacking = [rank for rank, part in enumerate(own) if save_id not in part]
        if all(rank in held.get(save_id, {}) for rank in lacking):
            fetches = {str(rank): held[save_id][rank] for rank in lacking}
            found[save_id] = (step, number, fetches)
    return found


def arrange_copies(
    session: FolderSession,
    ranks: Agreement,
    ledger: CallLedger,
    emitter: Emitter,
    bytes_per_s: float,
) -> CopiesInReach | None:
    """Makes the session copy snapshots, if there are `replicas`; returns what can be restored from.
    In one failure domain, none, with a warning; a `ValueError` for a host in two. On all ranks.
    """
    keeper, rank = session.keeper, ledger.rank
    session.copies = None
    if keeper is None:
        return None
    ledger = ledger.child("copies")
    own = Place.here()
    places = [Place(*each) for each in ranks.exchange([own.host, own.domain])]
    found = holders(places)
    hosts = [place.host for place in places]
    arrangement = ranks.together(lambda: Arrangement.begin(keeper, ledger, hosts, bytes_per_s))
    if session.pool.has_reserved:  # by a round that a restart has ended
        try:
            keeper.port()  # once it has answered, it reads from no buffer
        except CheckpointError as e:
            log.warning("copies in this rank's memory are lost: %s", e)
        session.pool.unreserve_all()
    in_reach = CopiesInReach(session, arrangement, rank)
    if found is not None:
        session.copies = CopyRounds(session.pool, ledger, arrangement, found[rank], emitter)
        return in_reach
    cause = (
        f"all ranks are in one failure domain ({own.domain}), so replicas=1 keeps no copies: the "
        "loss of it loses all snapshots in memory"
    )
    if rank == 0:
        log.warning("%s", cause)
    emitter.emit(CopySkipped(cause=cause))
    return in_reach

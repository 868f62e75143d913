"""Prepares the copies of a checkpointer, for saves and for restores."""

from __future__ import annotations

import logging

from outlast.async_checkpoint.peer_copies.arrangement import Arrangement, own_place
from outlast.async_checkpoint.peer_copies.placement import Place, holders
from outlast.async_checkpoint.peer_copies.rounds import CopyRounds
from outlast.async_checkpoint.restore.from_copies import CopiesInReach
from outlast.async_checkpoint.restore.restorer import Restorer
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.errors import CheckpointError
from outlast.events import CopySkipped, Emitter

log = logging.getLogger("outlast.checkpoint")


def arrange_copies(
    session: FolderSession,
    restorer: Restorer,
    ledger: CallLedger,
    emitter: Emitter,
    bytes_per_s: float,
) -> None:
    """Lets a checkpointer restore from copies, and its session make them, if there are `replicas`;
    with a warning and no copies if all ranks are in one failure domain. Called on all ranks.

    Raises:
        ValueError: if a host is in two failure domains.
    """
    keeper, rank = session.keeper, ledger.rank
    session.copies = None
    if keeper is None:
        return
    ledger = ledger.child("copies")
    own = own_place()
    places = [Place(*each) for each in restorer.ranks.exchange([own.host, own.domain])]
    found = holders(places)
    hosts = [place.host for place in places]
    arrangement = restorer.ranks.attempt(
        lambda: Arrangement.begin(keeper, ledger, hosts, bytes_per_s)
    )
    if isinstance(arrangement, CallFailure):
        raise CheckpointError(f"rank {arrangement.rank}: {arrangement.cause}")
    if session.pool.has_reserved:  # by a round that a restart has ended
        try:
            keeper.port()  # once it has answered, it reads from no buffer
        except CheckpointError as e:
            log.warning("copies in this rank's memory are lost: %s", e)
        session.pool.unreserve_all()
    restorer.copies = CopiesInReach(session, arrangement, rank)
    if found is not None:
        session.copies = CopyRounds(session.pool, ledger, arrangement, found[rank], emitter)
        return
    cause = (
        f"all ranks are in one failure domain ({own.domain}), so replicas=1 keeps no copies: the "
        "loss of it loses all snapshots in memory"
    )
    if rank == 0:
        log.warning("%s", cause)
    emitter.emit(CopySkipped(cause=cause))

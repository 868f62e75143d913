"""What the ranks tell one another of background calls: through a store, without a collective.

Keys of call i, under the ledger's prefix:

    i/name         what the call is                                first claim wins
    i/part/RANK    what a rank has to say of its finished part
    i/count        how many ranks have finished
    i/verdict      how the call ended: all done, or one failed     first claim wins
    i/conclusion   what the coordinator made of the parts
    i/left         how many ranks need no more of all this

Why one key `i/verdict`: "all have finished" and "one has failed" can be said in the same instant,
by different ranks. The store orders the two claims, and everyone goes by the one that won.
Therefore all ranks see the same verdict, always, and a verdict that was seen never changes: once
"done" is claimed nobody can fail or drop the call, and once it has failed nobody can finish it.

Why "done" is never claimed too early: a rank puts its part, then adds to the count; whoever's
addition makes the count N claims the verdict. All operations have one order at the store, so the
N-th addition stands behind all parts. Each rank adds once. A rank that fails does not add; so if
one has failed, the count never gets to N, and nobody claims "done" at all. Only a failure that is
found after the rank itself has finished (an abort, a name that differs) meets a claim of "done".

Operations: a constant number a rank and call, whatever the number of ranks; `parts`, which one
rank calls, reads a key for each of the others.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from outlast.coordination import MemoryStore, Store
from outlast.coordination.call_failure import CallFailure, Verdict

__all__ = ["CallFailure", "CallLedger", "Verdict", "connect_ledger"]


class CallLedger:
    """The protocol of background calls, for one rank. Holds no state but the two connections.

    Every method raises `StoreError` when the store cannot be reached, and none waits but the two
    whose names say so.

    Args:
        store: for all that does not wait.
        waiting: the same store on a connection of its own, for what waits: a connection serves
            one operation at a time.
        prefix: of the keys.
        rank: this one's.
        world_size: how many ranks there are.
    """

    def __init__(
        self, store: Store, waiting: Store, prefix: str, rank: int, world_size: int
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._waiting = waiting
        self._prefix = prefix

    def agree(self, name: str, value: str) -> str:
        """The value that the first rank gave under `name`; the same on all ranks, for good."""
        return self._store.claim(f"{self._prefix}/{name}", value.encode()).decode()

    def announce(self, index: int, name: str) -> None:
        """Says that this rank has scheduled `name` as call `index`.

        Raises:
            AsyncCallError: naming both, if another rank has scheduled something else as this
                call. The call has then failed for all ranks, unless it had failed before.
        """
        said = json.dumps({"rank": self.rank, "name": name}, separators=(",", ":"))
        first: dict[str, Any] = json.loads(
            self._store.claim(self._key(index, "name"), said.encode())
        )
        if first["name"] == name:
            return
        cause = (
            f"scheduled in different order on different ranks: call {index} is {name!r} on rank "
            f"{self.rank}, and {first['name']!r} on rank {first['rank']}"
        )
        failure = CallFailure.here(index, name, self.rank, cause)
        self.fail(index, failure)
        raise failure.to_error()

    def finish(self, index: int, part: bytes = b"") -> None:
        """Says that this rank has finished its part of the call. Once a call, and never together
        with a failure of this rank's part.

        Args:
            index: of the call.
            part: for the coordinator (`parts`); UTF-8, as JSON is.

        Raises:
            ValueError: if `part` is no UTF-8.
        """
        if part:
            part.decode()  # some stores take text only: refused here, and so with all of them
            self._store.put(self._key(index, f"part/{self.rank}"), part)
        if self._store.add(self._key(index, "count"), 1) == self.world_size:
            self._store.claim(self._key(index, "verdict"), Verdict().encode())

    def fail(self, index: int, failure: CallFailure) -> bool:
        """Says that the call has failed. Returns whether that is now the verdict: another rank may
        have failed before, or all have finished.
        """
        said = Verdict(failure).encode()
        return self._store.claim(self._key(index, "verdict"), said) == said

    def verdict(self, index: int) -> Verdict | None:
        """How the call ended, or `None` while that is open. Never waits for another rank."""
        data = self._store.read(self._key(index, "verdict"))
        return None if data is None else Verdict.decode(data)

    def await_verdict(self, index: int, timeout: float | None) -> Verdict:
        """Waits until the call has ended on all ranks, or failed on one.

        Args:
            index: of the call.
            timeout: in seconds; `None` waits for as long as the store lives.

        Raises:
            KeyTimeout: when the time is over.
        """
        return Verdict.decode(self._waiting.wait_for(self._key(index, "verdict"), timeout))

    def parts(self, index: int) -> list[bytes]:
        """What each rank said when it finished, in the order of ranks; for a call that is done."""
        keys = [self._key(index, f"part/{rank}") for rank in range(self.world_size)]
        return [self._store.read(key) or b"" for key in keys]

    def conclude(self, index: int, payload: bytes) -> None:
        """Says what came of a call that is done; for one rank, the coordinator.

        Args:
            index: of the call.
            payload: UTF-8, as JSON is, and not empty.

        Raises:
            ValueError: if it is something else.
        """
        if not payload.decode():
            raise ValueError("a conclusion says something")
        self._store.put(self._key(index, "conclusion"), payload)

    def await_conclusion(self, index: int, timeout: float | None) -> bytes:
        """Waits for what the coordinator makes of a call that is done.

        Args:
            index: of the call.
            timeout: in seconds; `None` waits for as long as the store lives.

        Raises:
            KeyTimeout: when the time is over.
        """
        return self._waiting.wait_for(self._key(index, "conclusion"), timeout)

    def forget(self, index: int) -> None:
        """Says that this rank needs no more of the call, and will say no more of it: it has the
        verdict, and the conclusion if there is to be one, and has said all it will. Once a call.
        When the last rank has said so, all keys are gone: the store does not grow.
        """
        # The coordinator has read the parts before it said the conclusion, which this rank has.
        self._store.delete(self._key(index, f"part/{self.rank}"))
        if self._store.add(self._key(index, "left"), 1) < self.world_size:
            return
        # All others are past this point: nobody reads these keys any more, nobody sets them.
        for name in ("name", "count", "verdict", "conclusion", "left"):
            self._store.delete(self._key(index, name))

    def _key(self, index: int, name: str) -> str:
        return f"{self._prefix}/{index}/{name}"


def connect_ledger(prefix: str, group: Any = None) -> CallLedger:
    """A ledger of the ranks of a process group, on the group's own store.

    A collective, to be called in the same order on all ranks of the group: the ranks agree on a
    random number under which no key can stand yet. A store may outlive a group, and a launcher that
    starts all workers again keeps it: the verdict on a call of an earlier ledger must never be
    taken for one of this.

    Args:
        prefix: what the ledger is for.
        group: the process group; `None` for the default one. Without any, or with one rank, the
            ledger is in this process.

    Raises:
        ValueError: if this rank is not in the group.
        StoreError: when the group's store cannot be reached.
    """
    from outlast.coordination import process_group_store
    from outlast.coordination.collectives import least

    place = process_group_store.place_in(group)
    if place is None:
        store = MemoryStore()
        return CallLedger(store, store, prefix, 0, 1)
    rank, world_size, name = place
    own, waiting = process_group_store.connections(group, 2)
    number = least(secrets.randbits(62), group)
    key = f"outlast/{prefix}/{name}/{number:x}"
    return CallLedger(own, waiting, key, rank, world_size)

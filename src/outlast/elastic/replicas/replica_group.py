"""The replicas of the job, and how they agree: together, or not at all.

With a process group of several ranks they talk through the group's store, in calls that all of
them make in the same order. Without one, each is on its own: the environment then tells which of
them writes.

A wait on the store happens in another thread, since torch's stores wait in C++, where neither
Ctrl-C nor a restart in place could interrupt it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from outlast.coordination import KeyTimeout
from outlast.coordination.call_failure import CallFailure, Verdict
from outlast.coordination.call_ledger import CallLedger, connect_ledger
from outlast.elastic import environment
from outlast.elastic.replicas import connect
from outlast.elastic.replicas.collective_guard import CollectiveGuard
from outlast.errors import CheckpointError, StoreError, TimeoutError
from outlast.system.waiting import ThreadedWait

__all__ = ["TIMEOUT", "Replicas", "current"]

T = TypeVar("T")

TIMEOUT = datetime.timedelta(minutes=30)
_LATE = "late"  # in place of what a call is for, where a replica did not come to it
_LINGER_S = 30.0
_GROUP_GONE = "the process group of this call is gone"


class Replicas:
    """The replicas, as one of them sees them. One thread at a time may use it.

    Args:
        ledger: through which they talk.
        rank: this replica's, in the job.
        world_size: how many the job has.

    Attributes:
        writes: whether this replica is the one that writes.
        timeout: how long each wait for others may take.
    """

    def __init__(self, ledger: CallLedger, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.writes = rank == 0
        self.timeout = TIMEOUT
        self._ledger = ledger
        self._calls = 0
        self._within: Replicas | None = None
        self._waiting: ThreadedWait[Any] | None = None
        self._given_up = False
        self._over: list[int] = []  # calls that this replica needs no more

    @property
    def current(self) -> bool:
        """Whether these are the replicas of the job still: a restart in place makes others."""
        if not self.several:
            return True
        return _current is not None and _current[1] is self and _current[0]() is _group()

    def give_up(self) -> None:
        """From any thread: nobody will answer any more. Waits end with a `CheckpointError`."""
        self._given_up = True
        if self._waiting is not None:
            self._waiting.abandon(CheckpointError(_GROUP_GONE))

    @property
    def several(self) -> bool:
        """Whether there are others to talk to."""
        return self._ledger.world_size > 1

    def together(self, what: str, work: Callable[[], T], *, collective: bool = False) -> T:
        """Does `work`, and returns when all replicas have done theirs.

        Args:
            what: is done, for errors.
            work: may raise anything.
            collective: it may wait for the other replicas by itself. If it does so in vain,
                because one of them has failed, the collectives of this process are ended; its
                process groups are of no use then.

        Raises:
            CheckpointError: on every replica, if it raised on one: naming that one, and its cause.
            TimeoutError: on every replica, naming those that did not come to this call in time.
        """
        index = self._next()
        wait = self._wait(lambda: self._ledger.await_verdict(index, None)) if self.several else None
        cause: Exception | None = None
        try:
            with (
                CollectiveGuard(wait.over)
                if wait is not None and collective
                else contextlib.nullcontext()
            ):
                value = work()
        except BaseException as e:
            self._say_failed(index, what, e)
            if not isinstance(e, Exception):
                raise
            cause = e
        else:
            try:
                self._ledger.finish(index, b"{}")
            except StoreError:
                # Another has failed, and left with the store. What it said was heard before.
                if wait is None or not wait.over.is_set():
                    raise
        try:
            verdict = self._verdict(index, what, wait)
            self._forget(index, verdict)
            if verdict.failure is not None:
                raise _error(verdict.failure, self._ledger.world_size) from cause
            return value  # type: ignore[possibly-undefined]
        finally:
            cause = None  # else it would refer to itself, and keep what its frames know

    def gather(self, what: str, part: Any, decide: Callable[[list[Any]], T]) -> T:
        """What `decide` makes, on rank 0, of all parts, told to all replicas.

        Args:
            what: is done, for errors.
            part: what this replica says: what JSON takes.
            decide: is given the parts in the order of the ranks; what it returns JSON takes too.

        Raises:
            CheckpointError: on every replica, if `decide` raised.
            TimeoutError: as `together`.
        """
        ledger, index = self._ledger, self._next()
        ledger.finish(index, json.dumps(part).encode())
        verdict = self._verdict(index, what)
        if verdict.failure is not None:
            self._forget(index, verdict)
            raise _error(verdict.failure, ledger.world_size)
        cause: Exception | None = None
        if ledger.rank == 0:
            answer: dict[str, Any]
            try:
                answer = {"is": decide([json.loads(said) for said in ledger.parts(index)])}
            except BaseException as e:
                answer = {"error": self._failure(index, what, e).encode().decode()}
                if not isinstance(e, Exception):
                    ledger.conclude(index, json.dumps(answer).encode())
                    raise
                cause = e
            ledger.conclude(index, json.dumps(answer).encode())
        try:
            said = json.loads(self._conclusion(index, what))
            self._forget(index, verdict)
            if "error" in said:
                failure = CallFailure.decode(said["error"].encode())
                raise _error(failure, ledger.world_size) from cause
            return said["is"]  # type: ignore[no-any-return]
        finally:
            cause = None  # as above

    def within(self) -> Replicas:
        """The same replicas on connections of their own: for work that `together` does, which
        holds up those of this one.
        """
        if self._within is None:
            self._within = Replicas(connect_ledger("elastic-within"), self.rank, self.world_size)
        self._within.timeout = self.timeout
        return self._within

    def linger(self) -> None:
        """Rank 0 may host the store: it waits until the others have heard what it said last, or
        for a while.
        """
        if not self.several:
            return
        index = self._next()
        with contextlib.suppress(StoreError, KeyTimeout):  # another left, knowing all it needs
            self._ledger.finish(index)
            if self._ledger.rank == 0:
                limit = min(self._limit, _LINGER_S)
                self._wait(lambda: self._ledger.await_verdict(index, limit)).result()
            self._over.append(index)

    # ------------------------------------------------------------------------------ within

    @property
    def _limit(self) -> float:
        return self.timeout.total_seconds()

    def _say_failed(self, index: int, what: str, error: BaseException) -> None:
        # If the store is out of reach, so it is for the others; this rank's own error comes first.
        with contextlib.suppress(StoreError):
            self._ledger.fail(index, self._failure(index, what, error))

    def _failure(self, index: int, what: str, error: BaseException) -> CallFailure:
        if isinstance(error, CheckpointError):  # it says all there is to say
            return CallFailure.here(index, what, self.rank, str(error))
        return CallFailure.of(error, index, what, self.rank)

    def _verdict(self, index: int, what: str, wait: ThreadedWait[Verdict] | None = None) -> Verdict:
        if wait is None:
            verdict = self._ledger.verdict(index)
            if verdict is not None:
                return verdict
            wait = self._wait(lambda: self._ledger.await_verdict(index, None))
        # Also one that is over by now is waited for: it must not wait for a key that is forgotten.
        if wait.over.wait(self._limit):
            return wait.result()
        missing = [rank for rank, said in enumerate(self._ledger.parts(index)) if not said]
        late = self._late(what, missing)
        # Now there is a verdict in any case, and so the wait ends.
        self._ledger.fail(index, CallFailure.here(index, _LATE, self.rank, str(late)))
        return wait.result()

    def _conclusion(self, index: int, what: str) -> bytes:
        try:
            return self._wait(lambda: self._ledger.await_conclusion(index, self._limit)).result()
        except KeyTimeout as e:
            raise self._late(f"{what} on rank 0", [0]) from e

    def _late(self, what: str, missing: list[int]) -> TimeoutError:
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return TimeoutError(
            f"{what}: {ranks} did not get there within {self.timeout}, rank {self.rank} waited"
        )

    def _forget(self, index: int, verdict: Verdict) -> None:
        """The keys of a call are deleted when a later one is done: only then is it certain that no
        replica, whose time was over in the last moment, still reads who has come to it.
        """
        with contextlib.suppress(StoreError):  # it ended with a rank that knew all it needs
            while verdict.done and self._over:
                self._ledger.forget(self._over.pop())
        self._over.append(index)

    def _wait(self, wait: Callable[[], T]) -> ThreadedWait[T]:
        self._waiting = started = ThreadedWait(wait, "outlast-replicas")
        if self._given_up:  # said before it could be told
            started.abandon(CheckpointError(_GROUP_GONE))
        return started

    def _next(self) -> int:
        self._calls += 1
        return self._calls


_current: tuple[Any, Replicas] | None = None  # the group, weakly, and what talks through it


def current(timeout: datetime.timedelta | None = None) -> Replicas:
    """The replicas as they are now. With a process group, it is a call that all of its ranks make
    in the same order; the connections live as long as the group does.

    Args:
        timeout: from now on, for each wait; as it was by default.

    Raises:
        ValueError: if the environment says something wrong.
        TimeoutError: if not all ranks come to the first call, in which they connect.
        CheckpointError: if they cannot connect.
    """
    global _current
    group = _group()
    if group is None:
        _current = None
        rank, world_size = environment.replica_rank(), environment.num_replicas()
        return Replicas(connect_ledger("elastic"), rank, world_size)
    if _current is None or _current[0]() is not group:
        ledger = connect.connect("elastic", group, timeout or TIMEOUT)
        _current = weakref.ref(group, _forget), Replicas(ledger, ledger.rank, ledger.world_size)
    if timeout is not None:
        _current[1].timeout = timeout
    return _current[1]


def _group() -> Any:
    """The default process group, if it has several ranks."""
    import torch.distributed as dist

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.distributed_c10d._get_default_group() if several else None


def _forget(group: Any) -> None:
    global _current
    if _current is not None and _current[0] is group:
        _current = None


def _error(failure: CallFailure, world_size: int) -> Exception:
    if failure.name == _LATE:
        return TimeoutError(failure.cause)
    where = f" on rank {failure.rank} on {failure.host}" if world_size > 1 else ""
    text = f"{failure.name} failed{where}: {failure.cause}"
    if failure.traceback and world_size > 1:
        text = f"{text}\n{failure.traceback.rstrip()}"
    return CheckpointError(text)

"""The replicas of the job, and their calls: a call that fails on one replica fails on all.

With a process group of several ranks, the replicas communicate through the group's store, in calls
that all of them make in the same order. Without one, each replica is alone, and the environment
determines which one writes.

Waits on the store run in another thread, because torch's stores wait in C++, where neither Ctrl-C
nor a restart in place can interrupt them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from outlast.coordination.call_ledger import CallFailure, CallLedger, Verdict, connect_ledger
from outlast.coordination.stores.store import KeyTimeout
from outlast.elastic import environment
from outlast.elastic.states.collective_guard import collective_guard, connect, late
from outlast.errors import CheckpointError, RankTimeout, StoreError
from outlast.system.arguments import Duration, as_timedelta
from outlast.system.waiting import ThreadedWait

T = TypeVar("T")

TIMEOUT = datetime.timedelta(minutes=30)
_LATE = "late"  # the name of the failure when a replica did not make a call in time
_LINGER_S = 30.0
_GROUP_GONE = "the process group of this call is gone"


class Replicas:
    """The replicas of the job, seen from this one. One thread at a time may use this object."""

    def __init__(self, ledger: CallLedger, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.writes = rank, world_size, rank == 0
        self.several = ledger.world_size > 1
        self.timeout = TIMEOUT
        self._ledger, self._calls = ledger, 0
        self._within: Replicas | None = None
        self._waiting: ThreadedWait[Any] | None = None
        self._given_up = False
        self._finished: list[int] = []  # calls whose keys can be deleted: see `_forget`

    @property
    def current(self) -> bool:
        """Whether these are still the replicas of the job: a restart in place makes new ones."""
        if not self.several:
            return True
        return _current is not None and _current[1] is self and _current[0]() is _group()

    def give_up(self) -> None:
        """Ends all waits with a `CheckpointError`, since no replica will answer. Thread-safe."""
        self._given_up = True
        if self._waiting is not None:
            self._waiting.abandon(CheckpointError(_GROUP_GONE))

    def together(self, what: str, work: Callable[[], T], *, collective: bool = False) -> T:
        """Calls `work` (in errors: `what`), and returns when all replicas have finished theirs.
        `collective`: it may wait for the others in collectives; if one has failed, the process
        groups cannot be used afterwards. On every replica, a `CheckpointError` if `work` raised on
        one (names it and the cause), a `RankTimeout` if one did not come in time.
        """
        index = self._next()
        wait = self._wait(lambda: self._ledger.await_verdict(index, None)) if self.several else None
        cause: Exception | None = None
        try:
            with collective_guard(wait.over) if wait and collective else contextlib.nullcontext():
                value = work()
        except BaseException as e:
            # If the store cannot be reached, the others cannot reach it either, and this rank's own
            # error matters more.
            with contextlib.suppress(StoreError):
                self._ledger.fail(index, self._failure(index, what, e))
            if not isinstance(e, Exception):
                raise
            cause = e
        else:
            try:
                self._ledger.finish(index, b"{}")
            except StoreError:
                # Another replica has failed, and the store ended with it, but its failure was
                # received before that.
                if wait is None or not wait.over.is_set():
                    raise
        try:
            verdict = self._verdict(index, what, wait)
            self._forget(index, verdict)
            if verdict.failure is not None:
                raise _error(verdict.failure, self._ledger.world_size) from cause
            return value  # type: ignore[possibly-undefined]
        finally:
            cause = None  # breaks the cycle from the exception to this frame, which it refers to

    def gather(self, what: str, part: Any, decide: Callable[[list[Any]], T]) -> T:
        """Collects a part from every replica, calls `decide` on rank 0, returns its result on all.

        Part and result are JSON. Raises as `together`.
        """
        ledger, index = self._ledger, self._next()
        ledger.finish(index, json.dumps(part).encode())
        verdict = self._verdict(index, what)
        if verdict.failure is not None:
            self._forget(index, verdict)
            raise _error(verdict.failure, ledger.world_size)
        cause: Exception | None = None
        if ledger.rank == 0:
            answer: dict[str, Any] = {}
            try:
                answer["is"] = decide([json.loads(each) for each in ledger.parts(index)])
            except BaseException as e:
                answer["error"] = self._failure(index, what, e).encode().decode()
                if not isinstance(e, Exception):
                    raise
                cause = e
            finally:
                ledger.conclude(index, json.dumps(answer).encode())
        try:
            conclusion = json.loads(self._conclusion(index, what))
            self._forget(index, verdict)
            if "error" in conclusion:
                failure = CallFailure.decode(conclusion["error"].encode())
                raise _error(failure, ledger.world_size) from cause
            return conclusion["is"]  # type: ignore[no-any-return]
        finally:
            cause = None  # as above

    def within(self) -> Replicas:
        """The same replicas on separate connections, for calls inside the work of `together`, which
        occupies the connections of this one.
        """
        if self._within is None:
            self._within = Replicas(connect_ledger("elastic-within"), self.rank, self.world_size)
        self._within.timeout = self.timeout
        return self._within

    def linger(self) -> None:
        """On rank 0, which may host the store: waits for a limited time until the others have read
        its last answer.
        """
        if not self.several:
            return
        index = self._next()
        with contextlib.suppress(StoreError, KeyTimeout):  # another replica left with its answer
            self._ledger.finish(index)
            if self._ledger.rank == 0:
                limit = min(self.timeout.total_seconds(), _LINGER_S)
                self._wait(lambda: self._ledger.await_verdict(index, limit)).result()
            self._finished.append(index)

    def _failure(self, index: int, what: str, error: BaseException) -> CallFailure:
        if isinstance(error, CheckpointError):  # its message is complete
            return CallFailure.here(index, what, self.rank, str(error))
        return CallFailure.of(error, index, what, self.rank)

    def _verdict(self, index: int, what: str, wait: ThreadedWait[Verdict] | None = None) -> Verdict:
        if wait is None:
            verdict = self._ledger.verdict(index)
            if verdict is not None:
                return verdict
            wait = self._wait(lambda: self._ledger.await_verdict(index, None))
        # Also join a wait that is over by now, which must not wait for a key that gets deleted.
        if wait.over.wait(self.timeout.total_seconds()):
            return wait.result()
        missing = [r for r, part in enumerate(self._ledger.parts_so_far(index)) if not part]
        error = late(what, missing, self.timeout, self.rank)
        # Now there is a verdict in any case, so the wait ends.
        self._ledger.fail(index, CallFailure.here(index, _LATE, self.rank, str(error)))
        return wait.result()

    def _conclusion(self, index: int, what: str) -> bytes:
        limit = self.timeout.total_seconds()
        try:
            return self._wait(lambda: self._ledger.await_conclusion(index, limit)).result()
        except KeyTimeout as e:
            raise late(f"{what} on rank 0", [0], self.timeout, self.rank) from e

    def _forget(self, index: int, verdict: Verdict) -> None:
        """Deletes the keys of earlier calls when a later one has succeeded. Only then is it certain
        that no replica whose timeout expired at the last moment is still reading which replicas
        made the call.
        """
        with contextlib.suppress(StoreError):  # the store ended with a rank that had its answer
            while verdict.done and self._finished:
                self._ledger.forget(self._finished.pop())
        self._finished.append(index)

    def _wait(self, wait: Callable[[], T]) -> ThreadedWait[T]:
        self._waiting = started = ThreadedWait(wait, "outlast-replicas")
        if self._given_up:  # `give_up` came before the assignment above
            started.abandon(CheckpointError(_GROUP_GONE))
        return started

    def _next(self) -> int:
        self._calls += 1
        return self._calls


_current: tuple[Any, Replicas] | None = None  # a weak reference to the group, and its replicas


def current(timeout: Duration | None = None) -> Replicas:
    """The current replicas. With a process group, all of its ranks must make this call in the same
    order: the first connects them, as `connect`, as long as the group lives. `timeout` is that of
    each wait from now on; unchanged by default.
    """
    global _current
    limit = None if timeout is None else as_timedelta("timeout", timeout, allow_zero=True)
    group = _group()
    if group is None:
        _current = None
        rank, world_size = environment.replica_rank(), environment.num_replicas()
        return Replicas(connect_ledger("elastic"), rank, world_size)
    if _current is None or _current[0]() is not group:
        ledger = connect("elastic", group, TIMEOUT if limit is None else limit)
        _current = weakref.ref(group, _forget), Replicas(ledger, ledger.rank, ledger.world_size)
    if limit is not None:
        _current[1].timeout = limit
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
        return RankTimeout(failure.cause)
    where = f" on rank {failure.rank} on {failure.host}" if world_size > 1 else ""
    text = f"{failure.name} failed{where}: {failure.cause}"
    if failure.traceback and world_size > 1:
        text = f"{text}\n{failure.traceback.rstrip()}"
    return CheckpointError(text)

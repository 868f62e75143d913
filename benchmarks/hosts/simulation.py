"""A restart of a job on many hosts, simulated: real protocol and combiner, modelled time.

Each member is the real state machine (`benchmarks.lib.members`); the members of a host share a real
`Combiner`. What is modelled is time: the way between a worker and the server of its host, the way
between hosts, the work of the server of each host, and that of the leader, which performs one
message after the other. The work of the members themselves takes no time here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator
from typing import Any
from unittest import mock

from benchmarks.lib.members import Member
from outlast.coordination import barrier, deciding, membership
from outlast.coordination.decision import Decision, ViewRecord, decode_record, encode_record
from outlast.coordination.ops import Link, Op, request
from outlast.coordination.replicated.operations import Operation, Result
from outlast.coordination.replicated.table import Table, is_covered
from outlast.coordination.stores.etcd.operations import _transactions
from outlast.inprocess.recovery import waits
from outlast.inprocess.recovery.host_protocol import Interrupted, Raised, Returned
from outlast.inprocess.recovery.state_machine import Machine
from outlast.launch.hosts.server.combining import Combiner, Done

__all__ = ["Model", "Outcome", "restart"]

_NEVER = b"outlast: not a value"
_AT_ONCE = 512


@dataclasses.dataclass(frozen=True)
class Model:
    """Times in seconds."""

    local: float = 50e-6  # one way between a worker and the server of its host
    network: float = 100e-6  # one way between hosts
    commit: float = 250e-6  # from a write at the leader until a majority has it
    request: float = 30e-6  # work of a host's server for a request
    message: float = 40e-6  # work of the leader for a message with one operation, and its answer
    wait: float = 20e-6  # the same for a wait: half when it comes, half when it ends
    recall: float = 20e-6  # the same for a recall of a read lease
    operation: float = 4e-6  # and for each further operation in it


@dataclasses.dataclass
class Outcome:
    """What one restart has cost.

    Attributes:
        seconds: from the fault until the last member is back in the function.
        messages, operations: that the leader got; with etcd, that its members got.
        events: that etcd has sent to the hosts, which each watch all bases of the store's keys.
        received_bytes, sent_bytes: of keys and values, at the leader.
        requests: of all workers.
        busy: the leader's seconds of work.
    """

    seconds: float = 0.0
    messages: int = 0
    operations: int = 0
    events: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    requests: int = 0
    busy: float = 0.0
    by_key: Counter[str] = dataclasses.field(default_factory=Counter)


class _Time:
    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), call))

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def run(self) -> None:
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


class _Worker:
    """One thing that is busy with one piece of work at a time."""

    def __init__(self, time: _Time) -> None:
        self._time, self._free_at, self.busy = time, 0.0, 0.0

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        self._free_at = max(self._free_at, self._time.now) + seconds
        self.busy += seconds
        self._time.at(self._free_at, then)


class _Leader:
    """The store of all hosts: the real table, and a queue before it."""

    def __init__(self, time: _Time, model: Model, leases: int, watchers: int) -> None:
        self.watchers = watchers  # of etcd; 0: the hosts hold the store
        self.time, self.model, self.worker = time, model, _Worker(time)
        self.leases = leases  # of reads
        self.table = Table()
        self.outcome = Outcome()
        self.waits: dict[str, dict[Hashable, Done]] = {}

    def receive(self, number: Hashable, operation: Operation, answer: Done) -> None:
        parts = operation.operations or (operation,)
        out = self.outcome
        if not self.watchers:
            out.messages += 1
        elif operation.name != "wait_for":  # without a request, if the key is known to be absent
            out.messages += len(_transactions(parts))
        elif operation.key in self.table.keys:
            out.messages += 1
        out.operations += len(parts)
        out.received_bytes += sum(len(p.key) + len(p.value) + len(p.expected) for p in parts)
        out.by_key.update(f"{p.name} {_kind(p.key)}" for p in parts)
        if operation.name == "wait_for":
            work = self.model.wait / 2
        else:
            work = self.model.message + self.model.operation * (len(parts) - 1)
        self.worker.work(work, lambda: self._perform(number, operation, answer))

    def cancel(self, number: Hashable, key: str) -> None:
        self.outcome.messages += not self.watchers
        self.waits.get(key, {}).pop(number, None)
        self.worker.work(self.model.message, lambda: None)

    def _perform(self, number: Hashable, operation: Operation, answer: Done) -> None:
        if operation.name == "wait_for":
            value = self.table.keys.get(operation.key)
            if value is None:
                self.waits.setdefault(operation.key, {})[number] = answer
            else:
                self._send(value, answer)
            return
        parts = operation.operations or (operation,)
        # Not the difference from the view `keys()`: that is a look at each key of the table.
        absent = {part.key for part in parts if part.key not in self.table.keys}
        result = self.table.perform(operation)
        appears = sum(key in self.table.keys for key in absent)
        puts = sum(part.name == "put" and part.key not in absent for part in parts)
        self.outcome.events += (appears + puts) * self.watchers
        appeared, self.table.appeared = self.table.appeared, []
        delay = self.model.commit if operation.writes else 0.0
        if any(is_covered(key) for key, _ in appeared) and self.leases:
            told = functools.partial(self._committed, result, answer, appeared)
            self.time.later(delay, lambda: self._recall(told))
        else:
            self.time.later(delay, lambda: self._committed(result, answer, appeared))

    def _recall(self, then: Callable[[], None]) -> None:
        """Every host is told, and confirms it; then the others may be told, too."""
        left = self.leases

        def confirmed() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        def arrive() -> None:
            self.outcome.messages += 1
            self.worker.work(self.model.recall / 2, confirmed)

        for _ in range(self.leases):
            self.worker.work(
                self.model.recall / 2, lambda: self.time.later(2 * self.model.network, arrive)
            )

    def _committed(self, result: Result, answer: Done, appeared: list[tuple[str, bytes]]) -> None:
        self._send(result, answer)
        for key, value in appeared:
            for waiting in self.waits.pop(key, {}).values():
                found = None if self.watchers else value  # with etcd, the clients have to read it
                self.worker.work(self.model.wait / 2, functools.partial(self._send, found, waiting))

    def _send(self, result: Result, answer: Done) -> None:
        for part in result if isinstance(result, list) else [result]:
            self.outcome.sent_bytes += len(part) if isinstance(part, bytes) else 8
        self.time.later(self.model.network, lambda: answer(result))


class _Upstream:
    def __init__(self, host: int, leader: _Leader) -> None:
        self._host, self._leader, self._count = host, leader, 0
        self._open: dict[Hashable, str] = {}

    def submit(self, operation: Operation, done: Done) -> Hashable:
        self._count += 1
        number = self._host, self._count
        self._open[number] = operation.key

        def answered(result: Result) -> None:
            if self._open.pop(number, None) is not None:
                done(result)

        leader = self._leader
        leader.time.later(leader.model.network, lambda: leader.receive(number, operation, answered))
        return number

    def cancel(self, handle: Hashable) -> None:
        key = self._open.pop(handle, None)
        if key is not None:
            leader = self._leader
            leader.time.later(leader.model.network, lambda: leader.cancel(handle, key))


class _SimulatedMember(Member):
    """A member whose function waits for the fault of the last member, after all have started."""

    async def assign(self, link: Link, record: ViewRecord) -> None:
        # No member is lost here.
        self.place.rank, self.place.world_size = self.place.member, len(record.slots())

    async def call(self) -> Returned | Raised | Interrupted:
        return await request(Op("function", str(self.place.iteration)))  # type: ignore[no-any-return]


class _Link(Link):
    async def add_and_read(self, key: str, amount: int, other: str) -> tuple[int, bytes]:
        op = Op("add_and_read", self.prefix + key, amount=amount, others=(self.prefix + other,))
        return await request(op)  # type: ignore[no-any-return]

    async def read_all(self, *keys: str) -> list[bytes | None]:
        names = tuple(self.prefix + key for key in keys)
        return await request(Op("read_all", names[0], others=names))  # type: ignore[no-any-return]


class _Task:
    """A member: its operations, as `TcpClient` sends them, through the server of its host."""

    def __init__(self, job: _Job, rank: int, server: _Worker, combiner: Combiner) -> None:
        self.job, self.rank, self._server, self._combiner = job, rank, server, combiner
        member = _SimulatedMember(rank, job.size, 0, lambda iteration: None)
        self.member = member
        machine = Machine(member, _Link("c/"), job.size)
        machine.decision = job.first  # shared: it keeps the set of its members
        self._machine: Coroutine[Any, Any, Any] = machine.run()

    def resume(self, value: Any) -> None:
        op = self._machine.send(value)
        self._begin(op)

    def interrupt_at(self, key: str) -> None:
        """Leaves the function when `key` exists, for which the monitor thread waits."""
        self._wait(key, lambda _: self.resume(Interrupted()))

    def _begin(self, op: Op) -> None:
        match op.name:
            case "function":
                self.job.entered(self)
            case "wait_for":
                self._wait(op.key, self.resume)
            case "read":
                self._read(op.key, self.resume)
            case "claim":
                self._request(Operation("compare_set", op.key, op.value), "", self.resume)
            case "put" | "append":  # without an answer
                self._request(Operation(op.name, op.key, op.value), "", lambda _: None)
                self.job.time.later(0.0, lambda: self.resume(None))
            case "add_and_read":
                self._add_and_read(op)
            case "read_all":
                self._read_all(op)
            case _:
                self._request(
                    Operation(op.name, op.key, amount=op.amount),
                    "",
                    lambda result: self.resume(result if op.name == "add" else None),
                )

    def _add_and_read(self, op: Op) -> None:
        totals: list[int] = []
        self._request(Operation("add", op.key, amount=op.amount), "", totals.append)
        self._request(
            Operation("read", op.others[0]),
            "",
            lambda value: self.resume((totals[0], value or b"")),
        )
        self.job.leader.outcome.requests -= 1

    def _read_all(self, op: Op) -> None:
        values: list[Any] = []

        def read(value: Any) -> None:
            values.append(value)
            if len(values) == len(op.others):
                self.resume(values)

        for key in op.others:
            self._request(Operation("read", key), "", read)
        self.job.leader.outcome.requests -= len(op.others) - 1

    def _wait(self, key: str, then: Callable[[Any], None]) -> None:
        def woken(result: Result) -> None:
            if result is None:  # as the connection of a client does: see `combining`
                self._combiner.submit(self, Operation("read", key), then)
            else:
                then(result)

        self._request(None, key, woken)

    def _read(self, key: str, then: Callable[[Any], None]) -> None:
        operation = Operation("compare_set", key, _NEVER, expected=_NEVER)
        self._request(operation, "", then)

    def _request(self, operation: Operation | None, key: str, then: Callable[[Any], None]) -> None:
        """A request to the server of the host: a wait for `key` if there is no operation."""
        job, time = self.job, self.job.time
        job.leader.outcome.requests += 1

        def done(result: Result) -> None:
            self._server.work(0.0, lambda: time.later(job.model.local, lambda: then(result)))

        def submit() -> None:
            if operation is None:
                self._combiner.wait(key, done)
            else:
                self._combiner.submit(self, operation, done)

        time.later(job.model.local, lambda: self._server.work(job.model.request, submit))


class _Job:
    def __init__(
        self,
        hosts: int,
        ranks: int,
        model: Model,
        *,
        combined: bool,
        read_leases: bool,
        etcd: bool,
    ) -> None:
        self.size, self.model, self.time = hosts * ranks, model, _Time()
        leases, watchers = hosts if read_leases else 0, hosts if etcd else 0
        self.leader = _Leader(self.time, model, leases, watchers)
        self.first = Decision(ViewRecord(0, tuple(range(self.size))))
        self.inside: list[_Task] = []
        self.tasks: list[_Task] = []
        for host in range(hosts):
            server = _Worker(self.time)
            combiner = self._combiner(host, server)
            for local in range(ranks):
                if not combined and local:
                    combiner = self._combiner(host * ranks + local + self.size, server)
                self.tasks.append(_Task(self, host * ranks + local, server, combiner))

    def _combiner(self, number: int, server: _Worker) -> Combiner:
        # The end of an iteration of the server's loop: after the requests that have arrived.
        return Combiner(_Upstream(number, self.leader), lambda call: server.work(0.0, call))

    def entered(self, task: _Task) -> None:
        self.inside.append(task)

    def start(self) -> None:
        for first in range(0, self.size, _AT_ONCE):  # each holds the list of ranks for a while
            for task in self.tasks[first : first + _AT_ONCE]:
                self.time.later(0.0, functools.partial(task.resume, None))
            self.time.run()
        assert len(self.inside) == self.size

    def restart(self, ranks: int) -> Outcome:
        """One fault: the last rank raises; the others, which wait for the end of the iteration as
        their monitor threads do, are interrupted. `ranks` of them are on each host.
        """
        self.leader.outcome = Outcome()
        self.leader.worker.busy = 0.0
        begun, inside, self.inside = self.time.now, self.inside, []
        failed = max(inside, key=lambda task: task.rank)
        fault = failed.member.fault("planned")
        for task in inside:
            if task is not failed:  # one after another: a host's first wait is sent by itself
                wait = functools.partial(task.interrupt_at, "c/over/0")
                self.time.later(1e-3 * (task.rank % ranks), wait)
        self.time.run()  # all wait: this is part of training
        assert not self.inside
        waiting = self.leader.outcome.messages
        self.leader.outcome = Outcome()
        self.leader.worker.busy = 0.0
        begun = self.time.now
        failed.resume(Raised(fault))
        self.time.run()
        assert waiting or self.leader.watchers
        assert len(self.inside) == self.size, (len(self.inside), self.size)
        outcome = self.leader.outcome
        outcome.seconds = self.time.now - begun
        outcome.busy = self.leader.worker.busy
        return outcome


def _kind(key: str) -> str:
    return "/".join(part for part in key.split("/") if not part.isdigit()).removeprefix("c/")


def restart(
    hosts: int,
    ranks: int,
    model: Model,
    *,
    combined: bool = True,
    read_leases: bool = False,
    etcd: bool = False,
) -> Outcome:
    """One restart of a job that runs on `hosts` with `ranks` each. Without `combined`, each worker
    is a client of the leader by itself. With `read_leases`, each host has one: it trains on GPUs.
    With `etcd`, messages and events are those of a store on etcd; the time is not modelled.
    """
    with _shared_results():
        job = _Job(hosts, ranks, model, combined=combined, read_leases=read_leases, etcd=etcd)
        job.start()
        return job.restart(ranks)


@contextlib.contextmanager
def _shared_results() -> Iterator[None]:
    """Pure functions of equal arguments are computed once, and not once for each member: the
    simulation of 16,384 members has one processor, and the members have one each.
    """
    dense: dict[int, bool] = {}
    same_view, decode = Machine._same_view, functools.lru_cache(decode_record)

    def same_view_once(self: Machine, values: dict[str, list[Any]]) -> bool:
        if id(values) not in dense:
            dense[id(values)] = same_view(self, values)
        return dense[id(values)]

    def patch(where: Any, name: str, new: Any) -> None:
        stack.enter_context(mock.patch.object(where, name, new))

    with contextlib.ExitStack() as stack:
        for module in (deciding, waits):
            patch(module, "decode_record", decode)
        patch(membership, "encode_record", functools.lru_cache(encode_record))
        patch(ViewRecord, "slots", functools.lru_cache(ViewRecord.slots))
        patch(barrier, "columns", functools.lru_cache(barrier.columns))
        patch(Machine, "_same_view", same_view_once)
        yield

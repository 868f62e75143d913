"""Combined operations: no client can tell, and the store has less to do."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from launch.hosts.served_store import Model
from outlast.coordination.replicated.operations import Failed, Operation, Result
from outlast.launch.hosts.server import combining
from outlast.launch.hosts.server.combining import Combiner, Done


class SteppedUpstream:
    """A store of all hosts. Whoever tests decides when an operation takes effect, and when its
    answer arrives.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.sent: dict[int, tuple[Operation, Done]] = {}
        self.answers: dict[int, tuple[Done, Result]] = {}
        self.count = 0

    def submit(self, operation: Operation, done: Done) -> Hashable:
        self.count += 1
        self.sent[self.count] = operation, done
        return self.count

    def cancel(self, handle: Hashable) -> None:
        assert isinstance(handle, int)
        self.sent.pop(handle, None)
        self.answers.pop(handle, None)

    def performable(self) -> list[int]:
        table = self.model.table
        return [n for n, (op, _) in self.sent.items() if op.name != "wait_for" or op.key in table]

    def perform(self, number: int) -> None:
        operation, done = self.sent.pop(number)
        self.answers[number] = done, self.model.perform(operation)

    def deliver(self, number: int) -> None:
        done, result = self.answers.pop(number)
        done(result)

    def settle(self) -> None:
        """Performs and answers all there is."""
        for number in self.performable():
            self.perform(number)
        for number in list(self.answers):
            self.deliver(number)


class Host:
    """A combiner, and the calls that wait for the end of the loop's iteration."""

    def __init__(self, model: Model) -> None:
        self.upstream = SteppedUpstream(model)
        self.deferred: list[Callable[[], None]] = []
        self.combiner = Combiner(self.upstream, self.deferred.append)

    def flush(self) -> None:
        calls, self.deferred[:] = self.deferred[:], []
        for call in calls:
            call()

    def run(self) -> None:
        """Until nothing is in flight but waits for keys that do not exist."""
        while self.deferred or self.upstream.performable() or self.upstream.answers:
            self.flush()
            self.upstream.settle()


# -------------------------------------------------------------------- linearizability
@dataclass
class Event:
    """An operation as a client saw it. Times count the steps of the schedule."""

    client: int
    operation: Operation
    begun: int
    ended: int = 1 << 30
    result: Result = None
    late: bool = False
    """A wait that has joined one in flight: its value may be one of before."""


def random_operation(rng: random.Random) -> Operation:
    key = rng.choice(["k", "l"])
    value = rng.choice([b"1", b"2", b"3"])
    expected = rng.choice([b"", b"1", value])
    name = rng.choice(
        ["put", "append", "claim", "add", "compare_set", "delete", "read", "check", "wait_for"]
    )
    return Operation(
        name,
        key,
        value if name in ("put", "append", "claim", "compare_set") else b"",
        rng.randint(1, 3) if name == "add" else 0,
        expected if name == "compare_set" else b"",
    )


@dataclass
class Client:
    number: int
    host: Host
    left: int
    busy: bool = False
    unanswered: int = 0  # puts and appends
    events: list[Event] = field(default_factory=list)

    def begin(self, operation: Operation, clock: Callable[[], int]) -> None:
        event = Event(self.number, operation, clock())
        self.events.append(event)
        self.left -= 1
        # Torch's client does not wait for the answer of these two: the next follows at once.
        answered = operation.name not in ("put", "append")
        self.busy = answered
        self.unanswered += not answered

        def done(result: Result) -> None:
            event.ended, event.result = clock(), result
            if answered:
                self.busy = False
            else:
                self.unanswered -= 1

        if operation.name == "wait_for":
            shared, _ = self.host.combiner.wait(operation.key, done)
            event.late = shared.handle is not None
        else:
            self.host.combiner.submit(self.number, operation, done)


def run_schedule(seed: int) -> list[list[Event]]:
    """Two hosts with three clients each; what happens next is chosen at random."""
    rng = random.Random(seed)
    model, now = Model(), 0
    hosts = [Host(model) for _ in range(2)]
    clients = [Client(n, hosts[n % 2], left=3) for n in range(6)]

    def clock() -> int:
        return now

    while True:
        now += 1
        steps: list[Callable[[], None]] = []
        for client in clients:
            if client.left and not client.busy:
                operation = random_operation(rng)
                if operation.name == "wait_for" and client.unanswered:
                    continue
                steps.append(lambda c=client, op=operation: c.begin(op, clock))
        for host in hosts:
            up = host.upstream
            steps += [lambda n=n, up=up: up.perform(n) for n in up.performable()]
            steps += [lambda n=n, up=up: up.deliver(n) for n in up.answers]
            if host.deferred:
                steps.append(host.flush)
        if not steps:
            return [[e for e in client.events if not e.late] for client in clients]
        rng.choice(steps)()


def is_linearizable(histories: list[list[Event]]) -> bool:
    """Whether there is an order of all operations that explains each result: it keeps the order of
    each client, and an operation that had ended before another began comes before it.
    """
    seen: set[tuple[Any, ...]] = set()

    def explained(positions: tuple[int, ...], table: tuple[tuple[str, bytes], ...]) -> bool:
        if (positions, table) in seen:
            return False
        seen.add((positions, table))
        heads = [h[p] for h, p in zip(histories, positions, strict=True) if p < len(h)]
        if all(event.ended == 1 << 30 for event in heads):
            return True  # only waits that have not ended, and what might follow them
        first_end = min(
            (e.ended for h, p in zip(histories, positions, strict=True) for e in h[p:]),
            default=1 << 30,
        )
        for number, (history, position) in enumerate(zip(histories, positions, strict=True)):
            if position == len(history):
                continue
            event = history[position]
            if event.begun > first_end or event.ended == 1 << 30:
                continue
            model = Model()
            model.table = dict(table)
            result = model.perform(event.operation)
            if event.operation.name == "wait_for" and result is None:
                continue
            if isinstance(result, Failed):  # the sum of a word
                matches = isinstance(event.result, Failed)
            else:
                matches = result == event.result
            further = (*positions[:number], position + 1, *positions[number + 1 :])
            if matches and explained(further, tuple(sorted(model.table.items()))):
                return True
        return False

    return explained((0,) * len(histories), ())


def failing_seeds(count: int) -> Iterator[int]:
    for seed in range(count):
        if not is_linearizable(run_schedule(seed)):
            yield seed


def test_no_client_can_tell_that_operations_are_combined() -> None:
    assert next(failing_seeds(200), None) is None


def join_any(group: combining._Group, operation: Operation) -> bool:
    return True


def answer_all(group: combining._Group, result: Result) -> None:
    for done in group._done:
        done(result)


def add_anywhere(
    batch: combining._Batch, client: Hashable, operation: Operation, done: Done
) -> None:
    batch._last.clear()
    _ADD(batch, client, operation, done)


def several_in_flight(combiner: Combiner) -> None:
    combiner._in_flight = False
    _SEND_SOON(combiner)


_ADD = combining._Batch.add
_SEND_SOON = Combiner._send_soon


MUTATIONS = {
    "any compare_set joins": (combining._Group, "accepts", join_any),
    "one sum for all, and all delete": (combining._Group, "answer", answer_all),
    "joins before the client's last": (combining._Batch, "add", add_anywhere),
    "several batches in flight": (Combiner, "_send_soon", several_in_flight),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_combination_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, wrong = MUTATIONS[name]
    monkeypatch.setattr(where, attribute, wrong)
    assert next(failing_seeds(20_000), None) is not None


# -------------------------------------------------------------------- the load
def test_the_store_gets_one_operation_for_many() -> None:
    host, results = Host(Model()), []
    for client in range(8):
        host.combiner.submit(client, Operation("append", "log", b"%d" % client), results.append)
        host.combiner.submit(client, Operation("add", "count", amount=1), results.append)
        host.combiner.submit(client, Operation("read", "ledger"), results.append)
        host.combiner.submit(
            client, Operation("compare_set", "view", b"%d" % client), results.append
        )
    host.flush()
    ((operation, _),) = host.upstream.sent.values()
    assert [(op.name, op.value, op.amount) for op in operation.operations] == [
        ("append", b"01234567", 0),
        ("add", b"", 8),
        ("read", b"", 0),
        ("compare_set", b"0", 0),
    ]
    host.run()
    assert sorted(r for r in results if isinstance(r, int)) == list(range(1, 9))
    assert results.count(b"0") == 8
    assert host.upstream.count == 1


def test_what_is_submitted_during_a_batch_leaves_as_one_when_it_is_answered() -> None:
    host = Host(Model())
    host.combiner.submit("a", Operation("add", "n", amount=1), lambda result: None)
    host.flush()
    for client in range(5):
        host.combiner.submit(client, Operation("add", "n", amount=1), lambda result: None)
        host.flush()
    assert host.upstream.count == 1
    host.run()
    assert host.upstream.count == 2
    assert host.upstream.model.table["n"] == b"6"


def test_waits_for_one_key_are_one_wait_and_end_with_their_clients() -> None:
    host, woken = Host(Model()), []
    handles = [host.combiner.wait("k", woken.append) for _ in range(8)]
    host.flush()
    handles += [host.combiner.wait("k", woken.append)]
    host.flush()
    assert host.upstream.count == 1
    for handle in handles[1:]:
        host.combiner.cancel(handle)
    host.upstream.model.perform(Operation("put", "k", b"v"))
    host.run()
    host.combiner.wait("k", woken.append)
    host.run()
    assert woken == [b"v", b"v"]
    host.upstream.model.perform(Operation("delete", "k"))
    last = host.combiner.wait("k", woken.append)
    host.flush()
    assert host.upstream.count == 3
    host.combiner.cancel(last)
    assert not host.upstream.sent
    assert not host.combiner._waits


def test_a_wait_after_a_deletion_on_the_same_host_is_a_new_one() -> None:
    host, early, late = Host(Model()), [], []
    host.combiner.wait("k", early.append)
    host.flush()
    host.upstream.model.perform(Operation("put", "k", b"v"))
    (wait,) = host.upstream.sent
    host.upstream.perform(wait)  # the answer is on its way
    host.combiner.submit("client", Operation("delete", "k"), lambda result: None)
    host.flush()
    host.upstream.perform(wait + 1)
    host.upstream.deliver(wait + 1)
    host.combiner.wait("k", late.append)
    host.flush()
    host.upstream.deliver(wait)
    assert (early, late) == ([b"v"], [])
    host.upstream.model.perform(Operation("put", "k", b"w"))
    host.run()
    assert late == [b"w"]


def test_an_error_reaches_each_client() -> None:
    host, results = Host(Model()), []
    for client in range(3):
        host.combiner.submit(client, Operation("add", "n", amount=1), results.append)
        host.combiner.submit(client, Operation("read", "k"), results.append)
    host.combiner.wait("never", results.append)
    host.flush()
    for _, done in list(host.upstream.sent.values()):
        done(Failed("the lease is over"))
    assert results == [Failed("the lease is over")] * 7


def test_a_large_batch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "MAX_BATCH_BYTES", 100)
    host = Host(Model())
    for client in range(10):
        host.combiner.submit(client, Operation("append", "log", b"x" * 60), lambda result: None)
    host.run()
    assert host.upstream.count == 5
    assert host.upstream.model.table["log"] == b"x" * 600

"""The store's operations on a model of etcd, interleaved by a seed, with everything that a network
and a change of etcd's leader can do to a request.

    simulate_etcd(4711)

runs a few hosts, each with a lease and a few clients, that perform random operations on few keys,
by themselves and in batches. A
request is performed and answered; or performed, and its answer is lost; or lost; or it gets no
answer and is performed later, after others, perhaps together with its repetition. Leases expire
while their hosts go on, clients give up, the watch lags, breaks and begins again, and etcd compacts
its history. The operations (`operations.py`) and the waits (`watch.py`) are the real ones.

What must hold, with the seed in the error:

- exactly once: a write that returned was performed once, while it ran; one that failed, at most
  once;
- linearizable: in the order of etcd's revisions, every result is that of a store in memory;
- fenced: no write of a host is performed once its lease has expired;
- no wait sleeps while its key exists.
"""

from __future__ import annotations

import base64
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from outlast.coordination.replicated.operations import Operation
from outlast.coordination.stores.etcd import layout
from outlast.coordination.stores.etcd.connection import Refused
from outlast.coordination.stores.etcd.operations import (
    Call,
    Event,
    Fence,
    LeaseOver,
    NoAnswer,
    Operations,
    Slot,
    _ask,
    _compares,
    _reads,
    _transactions,
)
from outlast.coordination.stores.etcd.watch import Wait, Waits
from outlast.errors import StoreError
from simulation.etcd.history import History, Performed
from simulation.etcd.model import INVALID, Change, EtcdModel

ROOT = b"/outlast/run/1/"
KEYS = ("a", "b")
_NAMES = (
    *("put", "claim", "read", "add", "add", "append", "append", "delete", "compare_set"),
    *("wait_for", "check", "keys", "delete_prefix"),
)
_MAX_STEPS = 5000


@dataclass
class _Client:
    """A client: one slot of a host."""

    name: str
    host: _Host
    slot: Slot
    left: int  # operations
    coroutine: Coroutine[Any, Any, Any] | None = None
    batch: list[Performed] = field(default_factory=list)
    transactions: list[list[Performed]] = field(default_factory=list)  # its writes, in order
    made: dict[int, Performed] = field(default_factory=dict)  # by the ID of the operation
    asked: Call | Event | None = None
    answer: Callable[[], Any] | None = None  # delivers what etcd has answered
    wait: Wait | None = None
    woken: bytes | bool = False


@dataclass
class _Host:
    lease: int
    key: bytes
    expired_at: int = 0


class _ModelWaits(Waits):
    """The real waits, fed by the simulation instead of by a thread."""

    def __init__(self, model: EtcdModel) -> None:
        super().__init__(_Asks(model), layout.store_keys(ROOT))  # type: ignore[arg-type]

    def _begin(self) -> None:
        return None

    def deliver(self, model: EtcdModel) -> bool:
        """The next message of the watch. Returns whether there was one."""
        if not self._begun:
            return False
        if self._seen + 1 <= model.compacted:
            # As etcd's, without a revision in the header.
            said = {"canceled": True, "compact_revision": str(model.compacted)}
            self._canceled({**said, "header": {}})
            return True
        self._list()
        start, end = self._prefix, layout.end_of(self._prefix)
        new = [c for c in model.changes if c.revision > self._seen and start <= c.key < end]
        if not new:
            return False
        changes = [c for c in new if c.revision == new[0].revision]
        self._dispatch({"events": [_event(change) for change in changes]})
        return True


class _Asks:
    """What the watch asks of etcd: which keys there are."""

    def __init__(self, model: EtcdModel) -> None:
        self.call = model.call


async def _wait_without_a_look(on: Operations, waits: Waits, wait: Performed) -> bytes:
    """As the store server of a host waits: the value may be as old as the watch."""
    base = layout.base_key(ROOT, wait.key)
    while (revision := waits.absent_at(base)) is not None:
        wait.begun = min(wait.begun, revision)
        if isinstance(found := await _ask(Event(base, after=revision)), bytes):
            return found
    return await on.wait_for(wait.key, None)


def _event(change: Change) -> dict[str, Any]:
    key, value = (base64.b64encode(each).decode() for each in (change.key, change.value))
    kv = {"key": key, "value": value, "mod_revision": str(change.revision)}
    return {"kv": kv, **({"type": "DELETE"} if change.deleted else {})}


class EtcdSimulation:
    """One run. `trace` lists what happened."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.model = EtcdModel()
        self.trace: list[str] = []
        self.done: list[Performed] = []
        self.faults = self.random.choice([0, 3, 8])
        self.expiries = self.random.choice([0, 1, 1])
        self.compactions = self.random.choice([0, 0, 2])
        self.late: list[tuple[_Client, Call]] = []
        self.writes: dict[str, list[Performed]] = {}  # by the name of a transaction
        self.numbers = itertools.count()
        self.clients: list[_Client] = []
        self.hosts: list[_Host] = []
        self.waits: dict[int, _ModelWaits] = {}
        self.history = History(ROOT, KEYS)
        for number in range(self.random.randint(2, 3)):
            host = _Host(number + 1, layout.host_keys(ROOT) + b"h%d" % number)
            self.model.grant(host.lease, host.key)
            self._keep()
            self.hosts.append(host)
            self.waits[host.lease] = _ModelWaits(self.model)
            for n in range(self.random.randint(1, 2)):
                name = f"h{number}.{n}"
                left = self.random.randint(2, 6)
                self.clients.append(_Client(name, host, Slot(ROOT, name), left))

    def run(self) -> None:
        """Runs all clients to their end, and checks what must hold."""
        for _ in range(_MAX_STEPS):
            actions = self._actions()
            if not actions:
                break
            self.random.choice(actions)()
        else:
            raise self._broken("it does not end")
        for client in self.clients:
            if client.wait is not None:
                key = client.batch[0].key
                if self.history.value(self.model.revision, key) is not None:
                    raise self._broken(f"{client.name} still waits for {key!r}, which exists")
        try:
            self.history.check([*self.done, *itertools.chain(*self.writes.values())])
        except AssertionError as e:
            raise self._broken(str(e)) from e

    # --------------------------------------------------------------------------- the schedule

    def _actions(self) -> list[Callable[[], None]]:
        actions: list[Callable[[], None]] = []
        for client in self.clients:
            if client.coroutine is None:
                if client.left > 0:
                    actions += [lambda c=client: self._begin(c)] * 2  # type: ignore[misc]
            elif client.answer is not None:
                actions += [lambda c=client: self._deliver(c)] * 3  # type: ignore[misc]
            elif client.woken is not False or isinstance(client.asked, Call):
                actions += [lambda c=client: self._perform(c)] * 3  # type: ignore[misc]
        if self.late and (actions or self.random.random() < 0.5):
            actions.append(self._perform_late)
        for waits in self.waits.values():
            if waits._begun and self._lags(waits):
                actions.append(lambda w=waits: self._watch(w))  # type: ignore[misc]
        busy = any(client.coroutine is not None for client in self.clients)
        if self.expiries and busy:
            actions.append(self._expire)
        if self.compactions and busy:
            actions.append(self._compact)
        return actions

    def _lags(self, waits: _ModelWaits) -> bool:
        return any(change.revision > waits._seen for change in self.model.changes) or (
            waits._seen < self.model.compacted
        )

    def _watch(self, waits: _ModelWaits) -> None:
        if not waits.deliver(self.model):
            waits._seen = self.model.revision  # events of other prefixes

    def _begin(self, client: _Client) -> None:
        client.left -= 1
        operations = Operations(ROOT, client.slot, Fence(client.host.key, client.host.lease))
        client.batch = [self._operation() for _ in range(self.random.choice([1, 1, 2, 3]))]
        waits = [each for each in client.batch if each.name == "wait_for"]
        if waits:
            client.batch = waits[:1]
            watch, key = self.waits[client.host.lease], waits[0].key
            looks = self.random.random() < 0.5
            client.coroutine = (
                operations.wait_for(key, None)
                if looks
                else _wait_without_a_look(operations, watch, waits[0])
            )
            client.transactions = []
        else:
            made = [_as_operation(performed) for performed in client.batch]
            batch = {id(each): p for each, p in zip(made, client.batch, strict=True)}
            client.made = batch
            client.coroutine = operations.perform(made)
            client.transactions = [
                written
                for some in _transactions(made)
                if (written := [batch[id(o)] for o in some if o.writes and not _reads(o)])
            ]
        for each in client.batch:
            self.trace.append(f"{client.name} begins {each.name} {each.key} {each.arguments}")
        self._resume(client, None, None)

    def _operation(self) -> Performed:
        name, key = self.random.choice(_NAMES), self.random.choice(KEYS)
        number = b"%d" % self.random.randint(1, 3)
        arguments: tuple[Any, ...] = {
            "put": (number,),
            "claim": (number,),
            "append": (number,),
            "add": (self.random.choice([1, 1, 2, -1]),),
            "compare_set": (self.random.choice([b"", b"1", b"2", b"11"]), number),
        }.get(name, ())
        return Performed(next(self.numbers), name, key, arguments, self.model.revision)

    def _resume(self, client: _Client, value: Any, error: BaseException | None) -> None:
        assert client.coroutine is not None
        client.answer, client.wait, client.woken = None, None, False
        try:
            if error is None:
                client.asked = client.coroutine.send(value)
            else:
                client.asked = client.coroutine.throw(error)
        except StopIteration as stop:
            results = stop.value if isinstance(stop.value, list) else [stop.value]
            for operation, result in zip(client.batch, results, strict=True):
                operation.ended, operation.result = self.model.revision, result
        except (StoreError, Refused) as e:
            if isinstance(e, LeaseOver):
                client.left = 0
                if not client.host.expired_at:
                    raise self._broken(f"{client.name} is fenced, and its lease lives") from e
            self.trace.append(f"{client.name} fails: {e}")
        else:
            self._asked(client)
            return
        self.trace.append(f"{client.name} ends with {[each.result for each in client.batch]!r}")
        self.done += client.batch
        client.coroutine, client.asked = None, None

    def _asked(self, client: _Client) -> None:
        asked = client.asked
        if isinstance(asked, Event):

            def wake(value: bytes | None) -> None:
                client.woken = True if value is None else value

            waits = self.waits[client.host.lease]
            client.wait = waits.call_at(asked.base, asked.base + b"\0", asked.after, wake)
        elif isinstance(asked, Call):
            name = _written_by(asked)
            if name is not None and name not in self.writes:
                self.writes[name] = self._transaction(client, asked)

    def _transaction(self, client: _Client, asked: Call) -> list[Performed]:
        """The operations of a transaction that is sent for the first time."""
        steps = asked.body["success"][1:]
        # A replacement of a value is tried again, by another transaction, after another write.
        nested = steps[0].get("request_txn", {}).get("success", [{}])
        replaces = any("request_delete_range" in step for step in nested[:1])
        if replaces:  # which one: one before it in the batch may have been refused by its read
            inner: Any = client.coroutine
            while inner.cr_code.co_name != "_compare_set":
                inner = inner.cr_await
            return [client.made[id(inner.cr_frame.f_locals["operation"])]]
        while _compares(_as_operation(client.transactions[0][-1])):
            client.transactions.pop(0)
        return client.transactions.pop(0)

    def _perform(self, client: _Client) -> None:
        asked = client.asked
        if isinstance(asked, Event):
            self._resume(client, client.woken, None)
            return
        assert isinstance(asked, Call)
        lost = NoAnswer("lost")
        if self.faults and self.random.random() < 0.4:
            self.faults -= 1
            fate = self.random.choice(["request", "answer", "late", "twice", "give up"])
            self.trace.append(f"{client.name}: {fate} {asked.path}")
            if fate in ("late", "twice"):
                self.late.append((client, asked))
            if fate in ("answer", "twice"):
                self._at_etcd(client, asked)
            if fate == "give up":
                self.late.append((client, asked))
                client.answer = lambda: self._resume(client, None, StoreError("no answer"))
            elif fate == "twice":
                self._answer_later(client, asked)  # the copy that came second
            else:
                client.answer = lambda: self._resume(client, None, lost)
            return
        self._answer_later(client, asked)

    def _answer_later(self, client: _Client, asked: Call) -> None:
        answer = self._at_etcd(client, asked)
        if isinstance(answer, Refused):
            client.answer = lambda: self._resume(client, None, answer)
        else:
            client.answer = lambda: self._resume(client, answer, None)

    def _deliver(self, client: _Client) -> None:
        assert client.answer is not None
        client.answer()

    def _perform_late(self) -> None:
        client, asked = self.late.pop(self.random.randrange(len(self.late)))
        self.trace.append(f"{client.name}: its late {_written_by(asked) or 'read'} arrives")
        self._at_etcd(client, asked)

    def _expire(self) -> None:
        host = self.random.choice(self.hosts)
        self.expiries -= 1
        if not host.expired_at:
            self.model.expire(host.lease)
            self._keep()
            host.expired_at = self.model.revision
            self.trace.append(f"the lease {host.lease} expires at {host.expired_at}")

    def _compact(self) -> None:
        self.compactions -= 1
        self.model.compact()
        self.trace.append(f"compacted at {self.model.compacted}")

    def _at_etcd(self, client: _Client, asked: Call) -> Any:
        before, revision = self.history.values(self.model.revision), self.model.revision
        try:
            answer = self.model.call(asked.path, asked.body)
        except Refused as e:
            if e.code == INVALID:
                raise self._broken(f"{client.name}: {e}") from e
            return e
        self._keep()
        if self.model.revision > revision:
            after = self.history.values(self.model.revision)
            if client.host.expired_at:
                raise self._broken(f"{client.name} writes after the end of its lease")
            for operation in self.writes[_written_by(asked) or ""]:
                held = self.model.keys.get(layout.base_key(ROOT, operation.key))
                took = operation.name != "compare_set" or (
                    held is not None and held.modified == self.model.revision
                )
                operation.writes.append((self.model.revision, took))
            self.trace.append(
                f"{client.name}: {_written_by(asked)} at {self.model.revision}: {before} -> {after}"
            )
        return answer

    def _keep(self) -> None:
        # The model forgets what is compacted; the checks do not.
        self.history.keep(self.model)

    def _broken(self, what: str) -> AssertionError:
        return AssertionError(f"seed {self.seed}: {what}\n" + "\n".join(self.trace))


def _as_operation(performed: Performed) -> Operation:
    name, key, arguments = performed.name, performed.key, performed.arguments
    if name == "add":
        return Operation(name, key, amount=arguments[0])
    if name == "compare_set":
        return Operation(name, key, arguments[1], expected=arguments[0])
    return Operation(name, key, *arguments)


def _written_by(asked: Call) -> str | None:
    """The name of a transaction that writes; `None` for one that reads."""
    [put, *_] = asked.body["success"]
    if "request_put" not in put:
        return None
    return base64.b64decode(put["request_put"]["value"]).decode()


def simulate_etcd(seed: int) -> EtcdSimulation:
    """Runs one schedule.

    Raises:
        AssertionError: naming the seed, if something does not hold.
    """
    simulation = EtcdSimulation(seed)
    simulation.run()
    return simulation

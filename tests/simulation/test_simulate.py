"""The whole membership protocol under ten thousand schedules, and under mutations of the
protocol, each of which the simulation must detect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from inprocess.mutations import mutate, simulation_finds
from outlast.clock import MonotonicClock
from outlast.coordination import barrier, decision, records
from outlast.coordination.decision import Facts, next_record
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.records import to_line
from outlast.coordination.stores.store import MemoryStore
from outlast.errors import RestartError
from outlast.events.emitter import Place
from outlast.inprocess.recovery.host_protocol import GrowPolicy, RecoveryState
from outlast.inprocess.recovery.state_machine import Machine
from outlast.inprocess.recovery.waits import _next_record, end_iteration_to_join
from outlast.inprocess.timeouts import Timeouts
from simulation.fault_budget import Schedule
from simulation.minimal_host import MinimalHost
from simulation.simulate import Result, simulate

SEEDS = 10_000
_CHUNK = 500


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(_CHUNK, SEEDS // 4, _CHUNK)),
        *(
            pytest.param(n, marks=[pytest.mark.slow, pytest.mark.exhaustive])
            for n in range(SEEDS // 4, SEEDS, _CHUNK)
        ),
    ],
)
def test_no_schedule_breaks_what_must_always_hold(first: int) -> None:
    # R1, R2 and R5 are checked in every step; a failure names the seed that replays it.
    results = [simulate(seed) for seed in range(first, first + _CHUNK)]
    # The schedules are varied: jobs that complete and jobs that do not, many restarts.
    assert sum(bool(r.returned) for r in results) > _CHUNK / 2
    assert sum(bool(r.raised) for r in results) > _CHUNK / 4
    assert sum(r.iterations > 2 for r in results) > _CHUNK / 4


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run() -> None:
    def told(result: Result) -> dict[str, Any]:
        return {
            **dataclasses.asdict(result),
            "raised": {n: repr(e) for n, e in result.raised.items()},
        }

    for seed in range(50):
        assert told(simulate(seed)) == told(simulate(seed))


def test_without_faults_everyone_returns_in_the_first_iteration() -> None:
    quiet = Schedule(6, deaths=0, faults=0, joins=0, leaves=0, double_deaths=0)
    for seed in range(20):
        result = simulate(seed, quiet)
        assert result.returned == {f"p{n}": f"p{n}" for n in range(1, 7)}
        assert (result.raised, result.iterations, result.seconds) == ({}, 1, 0.0)


def test_a_newcomer_is_turned_away_where_the_job_does_not_grow() -> None:
    schedule = Schedule(
        3, deaths=2, faults=0, leaves=0, double_deaths=0, p_death=0.05, grow=GrowPolicy.NEVER
    )
    results = [simulate(seed, schedule) for seed in range(50)]
    turned_away = [e for r in results for e in r.raised.values()]
    assert turned_away
    for error in turned_away:
        assert type(error) is RestartError
        assert "takes in no new processes" in str(error)


def test_members_that_were_all_mistaken_for_lost_before_the_start_go_on_to_learn_it() -> None:
    perform = perform_on(MemoryStore())
    host: Any = MinimalHost()
    host.place, host.durations = Place(member=0, rank=0, world_size=2), Timeouts().in_seconds()
    host.clock = MonotonicClock()
    machine = Machine(host, Link(), 2)
    for member in range(2):
        lost = to_line(records.LostRecord(member, "no heartbeat"))
        drive(machine.link.append(barrier.LEDGER, lost), perform)
    drive(barrier.complete(machine.link, "start/0", frozenset({0, 1})), perform)
    assert drive(machine._start(), perform) is RecoveryState.SETTLE


def stopped(seed: int) -> Result:
    """A schedule in which the job may be told to stop, twice."""
    return simulate(seed, dataclasses.replace(Schedule.of(seed), stops=2))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_request_to_stop_ends_the_job_after_one_restart() -> None:
    results = [stopped(seed) for seed in range(_CHUNK)]
    ended = [any(isinstance(e, SystemExit) for e in r.raised.values()) for r in results]
    assert sum(ended) > _CHUNK / 4
    assert sum(r.iterations > 1 for r in results) > _CHUNK / 10


STOP_MUTATIONS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a decision does not read the request": (
        next_record,
        "if facts.stop is not None:",
        "if False:",
    ),
    "the job is restarted more than once": (
        decision.ViewRecord.with_stop,
        "bool(stop.done) or tried or",
        "bool(stop.done) or",
    ),
    "members that are late restart after the stop": (
        decision.ViewRecord.with_stop,
        "bool(stop.done) or tried or None in self.slots()",
        "False",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOP_MUTATIONS)
def test_the_simulation_of_stops_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation_finds(monkeypatch, STOP_MUTATIONS[name], stopped, 1_500)


_RECORD = 'await link.append(f"{name}/arrived", record)\n    '
_COUNT = """\
count, ledger = await link.add_and_read(f"{name}/count", 1, LEDGER)
    return count + len(expected & _members(ledger)) >= len(expected)
"""

# Each: the function, a text in its source, and the replacement.
MUTATIONS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a loss does not check start": (
        MembershipProtocol.wake_for_lost,
        'await barrier.complete(self.link, f"start/{view.iteration}", view.expected)',
        "pass",
    ),
    "the job ends before its members have saved": (
        decision._saving,
        "if not roster or",
        "if True or",
    ),
    "members save as often as one of them is lost": (
        next_record,
        "if before.view.saves:",
        "if False:",
    ),
    "a member saves that keeps nothing": (
        decision._saving,
        'if record.get("keeps")',
        "if True",
    ),
    "a loss decides nothing": (
        MembershipProtocol.wake_for_lost,
        "await self.decide(view.iteration, Reached.LOST)",
        "pass",
    ),
    "a loss does not check goodbye": (
        MembershipProtocol.wake_for_lost,
        'await barrier.complete(self.link, "goodbye", view.expected)',
        "pass",
    ),
    "a loss does not end the iteration": (
        MembershipProtocol.wake_for_lost,
        "await self.end(view.iteration, RESTART)",
        "pass",
    ),
    "a loss is told to the iteration of the dead only": (
        MembershipProtocol.wake_for_lost,
        "at += 1",
        "break",
    ),
    "a loss is in the ledger last": (
        MembershipProtocol.report_all_lost,
        'await self.link.append(barrier.LEDGER, b"".join(map(to_line, losses)))\n'
        "    failed = frozenset(lost.member for lost in losses if not lost.discarded)\n"
        "    discarded = frozenset(lost.member for lost in losses if lost.discarded)\n"
        "    await self.wake_for_lost(iteration, failed, discarded)\n",
        "failed = frozenset(lost.member for lost in losses if not lost.discarded)\n"
        "    discarded = frozenset(lost.member for lost in losses if lost.discarded)\n"
        "    await self.wake_for_lost(iteration, failed, discarded)\n"
        '    await self.link.append(barrier.LEDGER, b"".join(map(to_line, losses)))\n',
    ),
    "who arrives does not read the ledger": (
        barrier.record_arrival,
        "_members(ledger)",
        '_members(b"")',
    ),
    "who arrives reads the ledger before": (
        barrier.record_arrival,
        _RECORD + _COUNT,
        "before = await link.read(LEDGER)\n    "
        + _RECORD
        + _COUNT.replace("_members(ledger)", "_members(before)"),
    ),
    "who arrives last does not complete the barrier": (
        barrier.arrive,
        "return await complete(link, name, expected)",
        "pass",
    ),
    "who arrives is counted before it stands in the log": (
        barrier.record_arrival,
        _RECORD + _COUNT,
        _COUNT.replace("return ", "may = ") + "    " + _RECORD + "return may\n",
    ),
    "a barrier does not wait for all": (
        barrier.complete,
        "done is not None or expected - arrived.keys() - _members(ledger)",
        "done is not None",
    ),
    "a barrier does not leave the lost out": (
        barrier.complete,
        "arrived.keys() - _members(ledger)",
        "arrived.keys()",
    ),
    "a start with gaps is a start": (
        Machine._start,
        "if self._same_view(values):",
        "if True:",
    ),
    "a decision does not know the lost": (
        decision.decide,
        "lost=frozenset(m for m in base if m is not None and m in lost)",
        "lost=frozenset()",
    ),
    "a decision takes in dead newcomers": (
        decision.decide,
        "and j.member not in lost",
        "",
    ),
    "a decision takes in who is in": (decision.decide, "j.member not in inside and", ""),
    "a decision forgets the newcomers": (
        next_record,
        "facts.joiners if rules.grow else []",
        "[]",
    ),
    "a decision is not claimed but written": (
        MembershipProtocol.decide,
        "data = await self.link.claim(key, encode_record(record))",
        "data = encode_record(record); await self.link.put(key, data)",
    ),
    "everyone follows its own decision": (
        MembershipProtocol.decide,
        "claimed = decode_record(data)",
        "claimed = record or decode_record(data)",
    ),
    "a decision is made before all have left": (
        MembershipProtocol._facts,
        "if before.view.expected - arrived.keys() - lost:",
        "if not arrived:",
    ),
    "a decision does not leave the lost out": (
        MembershipProtocol._facts,
        "arrived.keys() - lost:",
        "arrived.keys():",
    ),
    "a decision follows a job that is complete": (
        MembershipProtocol._facts,
        "if not arrived and over == COMPLETED:",
        "if False:",
    ),
    "a decision is read from the iteration before": (
        _next_record,
        "decision_key(iteration + 1, number)",
        "decision_key(iteration, number)",
    ),
    "a decision has the faults of the iteration before": (
        MembershipProtocol._facts,
        'f"fault/{iteration}"',
        'f"fault/{iteration - 1}"',
    ),
    "the last to leave decides nothing": (
        MembershipProtocol.leave,
        "record = await self.decide(iteration, Reached.ARRIVED)",
        "record = None",
    ),
    "who asks to join decides nothing": (
        end_iteration_to_join,
        "await membership.decide(iteration, Reached.ASKED)",
        "pass",
    ),
    "the last word on an iteration counts": (
        MembershipProtocol.end,
        'return await self.link.claim(f"over/{iteration}", how)',
        'await self.link.put(f"over/{iteration}", how)\n    return how',
    ),
    "nobody leaves before it says so": (
        Machine._settle,
        "await self.host.settle()",
        "pass",
    ),
    "left is said before it is so": (
        Machine._settle,
        "    await self.host.settle()\n",
        "    k, member = self.place.iteration, self.place.member\n"
        "    await self.membership.leave(k, member, self.record.expected, {})\n"
        "    await self.host.settle()\n",
    ),
    "one who has finished is enough": (MembershipProtocol.finish, ">= members", ">= 1"),
    "one may be missing": (MembershipProtocol.finish, ">= members", ">= members - 1"),
    "nobody completes the job": (MembershipProtocol.finish, ">= members", "> members"),
    "a restart is taken for completion": (
        Machine._complete,
        "if how == COMPLETED:",
        "if True:",
    ),
    "a value outlives its iteration": (Machine._complete, "self.value = None", "pass"),
    "who raises does not say so": (
        Machine._run,
        "await self.membership.report_fault(fault)",
        "pass",
    ),
    "initialize raises and does not say so": (
        Machine._initialize,
        "await self.membership.report_fault(fault)",
        "pass",
    ),
    "who leaves does not say so": (Machine._leave, "if self.place.member < 0:", "if True:"),
    "who leaves with RestartAbort ends itself only": (
        Machine._leave,
        "discarded, isinstance(error, RestartAbort)",
        "discarded, False",
    ),
    "an ended job goes on": (next_record, "last_cause, ended_by,", "last_cause, None,"),
    "who leaves an ended job restarts": (
        Machine._follow,
        "if (ender := decision.ended_by) is not None:",
        "if False:",
    ),
    "two processes take one place": (
        MembershipProtocol.register,
        " == token else None",
        " else None",
    ),
    "who dies before it is known is not told": (
        MembershipProtocol.report_killed,
        "await self.report_ended(token, range(rank, rank + 1), fault)",
        "return",
    ),
    "a newcomer that dies before it is known is not told": (
        MembershipProtocol.report_ended,
        "if belongs_to(joiner.token, owner):",
        "if False:",
    ),
    "an iteration is forgotten while some are in it": (
        MembershipProtocol.forget_before,
        "iteration -= _KEPT",
        "pass",
    ),
    "an end that is told late is a cause": (
        Facts.own_faults,
        " if not ends(fault) or fault.member in missing",
        "",
    ),
    "the end of a newcomer on its way is a cause": (
        Facts.own_faults,
        "fault.member in missing",
        "fault.member not in self.arrived",
    ),
    "the first cause is reported by everyone": (
        Machine._follow,
        "decision.reporter == self.place.member",
        "True",
    ),
}

MUTATIONS |= {
    "the ranks of a lost host are not claimed": (
        MembershipProtocol.report_ended,
        'belongs_to(await self._claim(rank, owner) or "", owner)',
        'belongs_to((await self.link.read(f"claim/{rank}") or b"").decode(), owner)',
    ),
    "the processes of a lost host are not known": (
        records.belongs_to,
        ' or token.startswith(process_token(owner, ""))',
        "",
    ),
    "the loss of a host leaves out replacements": (
        MembershipProtocol.report_ended,
        "if belongs_to(joiner.token, owner):",
        "if joiner.token == owner:",
    ),
    "the loss of a host takes replacements on other hosts along": (
        MembershipProtocol.report_ended,
        "if belongs_to(joiner.token, owner):",
        "if True:",
    ),
    "the loss of a host takes first members on other hosts along": (
        MembershipProtocol.report_ended,
        'if belongs_to(await self._claim(rank, owner) or "", owner)',
        "if await self._claim(rank, owner)",
    ),
    "what a dead launcher began is not finished": (
        MembershipProtocol.report_ended,
        "if before:",
        "if False:",
    ),
    "only one member of a lost host is lost": (
        MembershipProtocol.report_all_lost,
        'b"".join(map(to_line, losses))',
        "to_line(losses[0])",
    ),
    "a member that counts as lost asks to join": (
        Machine._decide,
        "    await leave_if_lost(self.membership, self.place.member)\n"
        "    return RecoveryState.JOIN",
        "    return RecoveryState.JOIN",
    ),
}


def test_each_mutation_changes_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    # In every run: the tests that use them are slow.
    for mutation in (*MUTATIONS.values(), *STOP_MUTATIONS.values()):
        with monkeypatch.context() as undone:
            mutate(undone, *mutation)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # One of them is found only after thousands of schedules.
    [
        pytest.param(name, marks=pytest.mark.exhaustive)
        if name.endswith("that is complete")
        else name
        for name in MUTATIONS
    ],
)
def test_the_simulation_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation_finds(monkeypatch, MUTATIONS[name], simulate, 5_000)

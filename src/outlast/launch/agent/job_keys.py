"""What the launcher reads in the workers' store, and the little that it writes there."""

from __future__ import annotations

import dataclasses
import signal

from outlast.coordination import moves
from outlast.coordination.blame import may_be_of_host
from outlast.coordination.job_record import JOB_KEY, JobState
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, perform_on, run
from outlast.coordination.records import (
    COMPLETED_BY,
    ENDED,
    SUSPECTED_LINK,
    SizeRecord,
    process_token,
)
from outlast.coordination.stores.store import Store
from outlast.events.fault_record import FaultRecord
from outlast.events.restart_causes import Interruption, RestartCount
from outlast.launch.agent.decisions import JobRecord


class JobKeys:
    """The keys of the wrapped function's latest call."""

    def __init__(self, store: Store) -> None:
        self._store, self._link = store, Link(perform=perform_on(store))

    def _membership(self, prefix: str, world_size: int = 0) -> MembershipProtocol:
        return MembershipProtocol(self._link.at(prefix), world_size)

    def job(self, rank: int = -1, process: str = "") -> JobRecord:
        """The state of the latest call of a wrapped function, if there was one, and what it has of
        this rank and process.
        """
        record = JobRecord.parse(self._store.read(JOB_KEY))
        if not record.prefix:
            return record
        of_call = COMPLETED_BY, "stop", "stopped", "progress"
        keys = *of_call, f"claim/{rank}", f"{ENDED}{process}"
        found = run(self._link.at(record.prefix).read_all(*keys))
        names, stop, stopped, progress, claim, killed = found
        completed = record.state is JobState.COMPLETED
        why, _, uncounted = (killed or b"").decode().partition("\n")
        return dataclasses.replace(
            record,
            completed_by=frozenset((names or b"").decode().split() if completed else ()),
            stopping=stop is not None,
            unsaved=stop is not None and not stopped,
            progress="" if progress is None else f"{record.prefix}{progress.decode()}",
            has_come=claim is not None,
            killed=why,
            uncounted=uncounted,
        )

    def ended_job(self) -> JobRecord:
        """`job`, with the restarts of all calls, and the fault that ended the job."""
        record = self.job()
        if not record.prefix:
            return record
        if record.state is JobState.ABORTED:
            fault = run(self._membership(record.prefix).cause_of_end())
            record = dataclasses.replace(record, fault=fault)
        calls, _, number = record.prefix.rstrip("/").rpartition("/")
        prefixes = [record.prefix]
        if number.isdecimal():  # the calls before it too
            prefixes = [f"{calls}/{call}/" for call in range(int(number) + 1)]
        counts: list[RestartCount] = []
        for prefix in prefixes:
            counts += run(self._membership(prefix).restart_counts())
        return dataclasses.replace(record, restarts=tuple(counts))

    def give_up(self, ranks: frozenset[int]) -> None:
        """Tell the members of the running call which ranks will not be replaced, so that they do
        not wait for them.
        """
        record = JobRecord.parse(self._store.read(JOB_KEY))
        if record.prefix:
            run(self._membership(record.prefix).give_up(ranks))

    def request_stop(self, number: signal.Signals) -> None:
        """Record the signal that the launcher has received, if it is a request to stop."""
        record = JobRecord.parse(self._store.read(JOB_KEY))
        if record.prefix and record.state is JobState.RUNNING:
            reason = f"{number.name} to the launcher"
            run(self._membership(record.prefix).request_stop_by(number, reason))

    def will_not_come(
        self, job: JobRecord, host: str, pid: int, rank: int, world_size: int, cause: str
    ) -> None:
        """Tell the members of the call not to wait for a rank whose only process has ended before
        it reached the call; no effect if it had reached it: then its monitor tells them.
        """
        # It names the host, whose loss then completes a report that it cuts off.
        owner = process_token(host, f"pid {pid}")
        self.ended(job, owner, range(rank, rank + 1), world_size, cause)

    def suspected_link(self) -> str:
        """The newest suspicion that a link between two hosts is broken: the key under which the
        members wait for the result. Empty if there was none.
        """
        return (self._store.read(SUSPECTED_LINK) or b"").decode()

    def first_causes(self, job: JobRecord, since: int) -> tuple[int, list[tuple[str, FaultRecord]]]:
        """How many restarts of the call have been decided, and the first causes of those after the
        first `since`, with the ID of the host of each; without those that say nothing of the host.
        """
        if not job.prefix:
            return 0, []
        newest, found = run(self._membership(job.prefix).first_causes(since))
        # See `records.process_token`.
        named = [(token.partition("/")[0], fault) for token, fault in found]
        blamed = [
            (host, fault)
            for host, fault in named
            if not (fault.mistake or fault.may_be_harmless) and may_be_of_host(fault.cause)
        ]
        return newest, blamed

    def end_probe(self, key: str) -> None:
        """Let the members go on that wait for the result under this key."""
        prefix, _, iteration = key.rpartition("links/")
        run(self._membership(prefix).links_known(int(iteration)))

    def take_back(self, ranks: range) -> None:
        run(self._membership("").take_back(frozenset(ranks)))

    def size(self, job: JobRecord) -> SizeRecord | None:
        """What the members need that hold a restart; `None` if they have never held one."""
        return run(self._membership(job.prefix).size()) if job.prefix else None

    def least(self, job: JobRecord) -> int:
        """How many ranks the call needs; -1 if it has not said so."""
        return run(moves.least(self._membership(job.prefix))) if job.prefix else -1

    def ask_to_leave(self, host: str, ranks: range, reason: str, *, saves: bool) -> None:
        """Have these ranks of a host leave the call, without successors that are ready."""
        membership = self._membership(JobRecord.parse(self._store.read(JOB_KEY)).prefix)
        if members := run(moves.holders(membership, ranks, host)):
            request = moves.LeaveRequest(members, reason, succeeded=False, saves=saves)
            run(moves.request_leave(membership, request))

    def replaces(self, host: str, rank: int) -> bool:
        """Whether a host that leaves is to replace a dead rank: see `moves`."""
        prefix = JobRecord.parse(self._store.read(JOB_KEY)).prefix
        return run(moves.replaces(self._membership(prefix), rank, host))

    def has_ranks(self, job: JobRecord, host: str, ranks: range) -> bool:
        """Whether any of these ranks is in the call, on this host."""
        membership = self._membership(job.prefix)
        found = (run(moves.holder(membership, rank, host)) for rank in ranks if job.prefix)
        return any(member >= 0 for member in found)

    def trains(self, job: JobRecord, host: str, ranks: range) -> bool:
        """Whether all of these ranks are in the call, on this host, and none was asked to leave."""
        return bool(job.prefix) and run(moves.train(self._membership(job.prefix), ranks, host))

    def last_save_s(self) -> float | None:
        """How long the save before a stop may take; `None` if the job has not begun it."""
        record = JobRecord.parse(self._store.read(JOB_KEY))
        return run(self._membership(record.prefix).last_save())

    def ended(
        self, job: JobRecord, owner: str, ranks: range, world_size: int, cause: str, host: str = ""
    ) -> None:
        """Tell the members of the call that a process, or a host of this name, is lost with its
        ranks: this ends their iteration.
        """
        if not job.prefix:
            return
        membership = self._membership(job.prefix, world_size)
        fault = FaultRecord(
            iteration=0,
            member=-1,
            rank=ranks[0],
            host=host,
            pid=-1,
            interruption=Interruption.TERMINATED.value,
            cause=cause,
        )
        run(membership.report_ended(owner, ranks, fault))

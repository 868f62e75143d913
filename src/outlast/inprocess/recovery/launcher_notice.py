"""Tells the launcher the state of the job, so that it knows when a replacement is useful.

One key in the launcher's store holds the newest call that has begun, and the prefix of its keys,
under which the launcher finds a request to stop. Every change is a compare-and-set: another rank
may already be in the next call, and a joiner may arrive at a call that has ended. The processes
that have completed the call are a log of their own: many append at once.
"""

from __future__ import annotations

import dataclasses

from outlast.coordination.job_record import JOB_KEY, CallRecord, JobState
from outlast.coordination.records import COMPLETED_BY, ENDED
from outlast.inprocess.store import Connection


class LauncherNotice:
    """The notices of one call. `process` names this one to `outlast run`; else it is empty."""

    def __init__(self, connection: Connection, call: int, prefix: str, *, process: str) -> None:
        self._connection, self._process = connection, process
        self._running = CallRecord(JobState.RUNNING, prefix, call=call)

    def running(self) -> None:
        held = self._connection.claim(JOB_KEY, self._running.encode())
        while CallRecord.parse(held).call < self._running.call:
            held = self._change(held, self._running)

    def aborted(self, *, reports: bool) -> None:
        """The members ended the job; `outlast run` reads which process reported why (`reports`)."""
        held, call = self._running.encode(), self._running.call
        while (record := CallRecord.parse(held)).call == call:
            if record.state is JobState.COMPLETED:
                return
            wanted = dataclasses.replace(record, state=JobState.ABORTED)
            if reports:
                wanted = dataclasses.replace(wanted, reporter=self._process)
            held = self._change(held, wanted)
            if held == wanted.encode():
                return  # otherwise another rank was first

    def completed(self) -> None:
        """The call has completed. `outlast run` also reads the names of the processes that
        completed it: if one of them fails afterwards, the job has failed; any other was lost
        earlier. The name comes first: a process that ends after the call has completed is in the
        log that the launcher reads then.
        """
        if self._process:
            key = self._running.prefix + COMPLETED_BY
            self._connection.append(key, f"{self._process}\n".encode())
        completed = dataclasses.replace(self._running, state=JobState.COMPLETED)
        self._change(self._running.encode(), completed)

    def leaves(self, why: str) -> None:
        """This process leaves for a replacement, which does not count against `--max-restarts`."""
        if self._process:
            key = f"{self._running.prefix}{ENDED}{self._process}"
            self._connection.put(key, f"\n{why}".encode())

    def _change(self, before: bytes, after: CallRecord) -> bytes:
        return self._connection.compare_set(JOB_KEY, before, after.encode())

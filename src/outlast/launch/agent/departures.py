"""Workers that take no part any more, while their process goes on.

*Their rank has left the training*, and the process stays: for a thread that is not a daemon, a
pool, an exit handler, or what the program does after the call. After an error, the process has
`--grace`, and is ended. Its rank does not wait for that: it is treated as if the process had ended,
after a moment in which most do, with their last words on stderr. By then the old process has left
the ledger, and has no process group, store or checkpoint writer of the job; only its memory, on the
device too, is its own until its end. If all ranks have left, none of them is replaced. One that
calls a wrapped function again has not left.

A script at its end, without an error, waits for its threads, and they may have work to do. It has
`--grace` once the scripts of all workers here are at their end, as a job must end. A program that
still runs its script is never ended for that, nor one that leaves because it was told to stop.

*A replacement that comes too late* for a call may wait, before it, for ranks that will not come: in
a store that it serves itself. It has `--grace` once all workers here that have completed the call
have ended. One that comes to the call after all, and gets `None`, is as one that has completed it.

*They are stopped*, by SIGSTOP for one. Within a wrapped call, the monitor process of a rank sees
that, and ends it. Of any other worker, the kernel tells its parent, the launcher, with SIGCHLD: one
that does not go on within the hard timeout of a `Wrapper` is killed, and then replaced or restarted
as any that ended.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Sequence

import psutil

from outlast.coordination.job_record import JobState
from outlast.coordination.records import process_name
from outlast.launch.agent.decisions import TOLD_TO_STOP
from outlast.launch.agent.resources import JobResources
from outlast.launch.workers import descendants, device_holders
from outlast.launch.workers.descendants import LINGER_S, TERMINATE_S
from outlast.launch.workers.worker_group import Worker
from outlast.system.departure import Departure

_SOON_S = 0.1
_STOPPED_S = 90.0
"""The default `hard_timeout` of a `Wrapper`."""


class DepartedWorkers:
    """Calls `left` for each worker that is to be treated as ended, with its exit code."""

    def __init__(self, resources: JobResources, left: Callable[[Worker, int], None]) -> None:
        self._resources, self._left = resources, left
        # Python's own end takes a moment, with all that torch has made.
        self._grace_s = max(resources.job.grace_s, TERMINATE_S)
        self._timed: set[int] = set()

    def on_notice(self) -> None:
        pid, data = self._resources.departures.receive()
        worker = self._resources.workers.get(pid)
        if worker is None:
            return  # a child of a worker, or one that has been reaped
        departure = Departure.parse(data)
        if departure.asks:
            self._resources.coordinator.ask_to_leave(departure.asks)
            return
        worker.at_end = worker.at_end or not departure.call
        before = worker.departure
        if before is None or not before.code:  # an error says more than the end of the script
            worker.departure = departure
        if departure.call or (departure.code and before is None):
            self._settle_later(worker, LINGER_S)
            if departure.code not in (0, TOLD_TO_STOP) or worker.successor is not None:
                self._end_later(worker)
        elif departure.threads:  # it has written its last words, and waits for these
            self._settle_later(worker, _SOON_S)
        self.look()

    def look(self) -> None:
        workers = list(self._resources.workers)
        if all(worker.at_end for worker in workers) or self._are_late(workers):
            for worker in workers:
                self._end_later(worker)

    def _are_late(self, workers: Sequence[Worker]) -> bool:
        ended, coordinator = self._resources.workers.last_exit_codes, self._resources.coordinator
        if 0 not in ended.values() or not all(worker.start for worker in workers):
            return False
        job, host = coordinator.keys.job(), coordinator.host_id
        if any(each.departure == Departure(0, job.prefix, []) for each in workers):
            return False
        names = {process_name(host, worker.pid) for worker in workers}
        return job.state is JobState.COMPLETED and not names & job.completed_by

    def _end_later(self, worker: Worker) -> None:
        if worker.pid not in self._timed:
            self._timed.add(worker.pid)
            self._resources.loop.call_later(self._grace_s, functools.partial(self._end, worker))

    def _settle_later(self, worker: Worker, seconds: float) -> None:
        self._resources.loop.call_later(seconds, functools.partial(self._settle, worker))

    def _settle(self, worker: Worker) -> None:
        departure, job = worker.departure, self._resources.coordinator.keys.job()
        assert departure is not None
        of_call = job.state is JobState.RUNNING and job.prefix == departure.call
        wanted = of_call or (not departure.call and departure.code)
        there = self._is_there(worker) and not worker.settled
        if there and wanted and departure.code != TOLD_TO_STOP:
            self._left(worker, departure.code)

    def _end(self, worker: Worker) -> None:
        departure, prefix = worker.departure, self._resources.coordinator.keys.job().prefix
        self._timed.discard(worker.pid)
        of_call = departure and departure.code and prefix == departure.call
        left = worker.settled or worker.at_end or of_call
        is_late = not left and self._are_late(list(self._resources.workers))
        if not self._is_there(worker) or not (left or is_late):
            return
        known = departure.threads if departure is not None else ()
        threads = f"; its threads: {', '.join(known)}" if known else ""
        how = "came too late for the training" if is_late else "has left the training"
        self._resources.console.say(
            f"rank {worker.rank} {how}, and its process {worker.pid} has not ended within "
            f"{self._grace_s:g} s{threads}: it is ended"
        )
        if is_late:
            worker.killer = "the launcher, as it came too late"
        worker.ended_by_launcher = True
        os.kill(worker.pid, signal.SIGTERM)
        self._resources.loop.call_later(TERMINATE_S, functools.partial(self._kill, worker))

    def _kill(self, worker: Worker) -> None:
        if self._is_there(worker):
            os.kill(worker.pid, signal.SIGKILL)

    def _is_there(self, worker: Worker) -> bool:
        return self._resources.workers.get(worker.pid) is worker


def reap_workers(resources: JobResources) -> list[tuple[Worker, int, float | None]]:
    """Reaps the ended children; returns the workers, their exit codes and error file times, without
    those that were treated as ended before.
    """
    ended = []
    for pid, code in descendants.ended_children():
        worker = resources.workers.get(pid)
        if worker is not None and worker.ended_by_launcher and code < 0:
            code = worker.departure.code if worker.departure is not None else code
        if worker is not None and code != 0:
            worker.holders = descendants.kill_group(pid, device_holders.holds_device)
            descendants.terminate_group(pid)
            resources.loop.call_later(LINGER_S, functools.partial(descendants.kill_group, pid))
        descendants.reap(pid)
        if worker is None:
            resources.other_child_ended(pid, code)
        else:
            settled = worker.settled
            resources.workers.remove(worker, code)
            if not settled:
                ended.append((worker, code, worker.error_time()))
    return ended


class StoppedWorkers:
    """Call `look` after each SIGCHLD."""

    def __init__(self, resources: JobResources) -> None:
        self._resources = resources
        self._stops: dict[int, int] = {}  # how often each worker has been stopped, by its pid

    def look(self) -> None:
        # One at a time, as the ends of children; each is told once.
        kinds = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while (found := _changed(kinds)) is not None:
            worker = self._resources.workers.get(found.si_pid)
            if worker is not None and found.si_code == os.CLD_STOPPED:
                self._on_stop(worker, found.si_status)

    def _on_stop(self, worker: Worker, number: int) -> None:
        if self._resources.coordinator.keys.job().state is JobState.RUNNING:
            return
        self._stops[worker.pid] = count = self._stops.get(worker.pid, 0) + 1
        self._resources.console.say(
            f"rank {worker.rank} (pid {worker.pid}) was stopped by {signal.Signals(number).name}: "
            f"it is killed unless it goes on within {_STOPPED_S:g} s"
        )
        self._resources.loop.call_later(_STOPPED_S, functools.partial(self._end, worker, count))

    def _end(self, worker: Worker, count: int) -> None:
        if self._resources.workers.get(worker.pid) is not worker:
            return
        is_stopped = psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
        if self._stops[worker.pid] == count and is_stopped:
            worker.killer = f"the launcher, after it was stopped for {_STOPPED_S:g} s"
            os.kill(worker.pid, signal.SIGKILL)


def _changed(kinds: int) -> os.waitid_result | None:
    try:
        return os.waitid(os.P_ALL, 0, kinds)
    except ChildProcessError:
        return None

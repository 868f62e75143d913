"""What a program may ask of its job from any thread: that it stops, or that this host leaves it."""

from __future__ import annotations

from outlast.elastic.job.ending import Ending
from outlast.elastic.job.progress import JobProgress
from outlast.elastic.stop_signals import StopSignals
from outlast.inprocess.running_call import RunningCall


class JobRequests(JobProgress):
    """A base class of `Job`, which sets these three."""

    _call: RunningCall | None
    _ending: Ending
    _stop: StopSignals

    def stop(self, why: str = "stop() was called") -> None:
        """Makes all ranks save after the same step, and exit. Any thread of any rank may call this,
        for example when the cloud provider announces that it will reclaim the machine.
        """
        self._check_open()
        self._stop.request(why)

    def leave(self, why: str = "leave() was called") -> None:
        """Has the host of this rank leave a job on many hosts: its ranks move to another host at
        the end of a later step, and exit with code 0; the others go on. Any thread may call this.

        Raises:
            ValueError: if the job has one host, or no `outlast run` that could move its ranks.
        """
        self._check_open()
        if self._call is None or not self._call.launch.host_id:
            raise ValueError("leave(): only in a wrapped function, in a job of several hosts")
        self._call.ask_to_leave(why)

    def _check_open(self) -> None:
        if self._ending.released:
            raise ValueError("this job is closed")

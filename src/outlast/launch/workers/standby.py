"""Standby processes: they have imported what a worker imports, and take the place of a dead one."""

from __future__ import annotations

import dataclasses
import json
import selectors
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from outlast.launch import environment
from outlast.launch.config.job_spec import JobSpec
from outlast.launch.event_loop import EventLoop, Timer
from outlast.launch.workers import exec_shim
from outlast.launch.workers.descendants import kill_group
from outlast.launch.workers.output import Console
from outlast.launch.workers.standby_process import PACKET, Settings

_PROGRAM = str(Path(__file__).with_name("standby_process.py"))
_NO_LIMIT = 1_000_000
_BACKOFF_S = (1.0, 5.0, 30.0)
"""The wait after the first, second and each further standby in a row that died. No more are started
after the fourth, if it died before it was ready.
"""

_AFTER_USE_S = 3.0
"""The wait after a standby has become a worker: its successor must not slow the restart down."""


@dataclasses.dataclass
class Standby:
    """A standby process, the launcher's end of its socket, and its environment."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    environment: dict[str, str]
    answered: bool = False
    ready: bool = False


class StandbyPool:
    """Keeps `size` standby processes, once `fill` has been called, until `close`.

    All methods are called in the thread of the event loop, the main thread: the kernel ends the
    processes together with that thread.
    """

    def __init__(self, job: JobSpec, loop: EventLoop, console: Console, *, size: int) -> None:
        self.size, self._job, self._loop, self._console = size, job, loop, console
        self._standbys: dict[int, Standby] = {}
        self._limit = _NO_LIMIT
        self._deaths = 0
        self._timer = Timer()
        self.closed = False

    @property
    def pids(self) -> list[int]:
        """The processes that are to stay; none after `close`."""
        return [] if self.closed else list(self._standbys)

    @property
    def ready(self) -> int:
        return sum(standby.ready for standby in self._standbys.values())

    def open(self) -> None:
        self.closed = False

    def fill(self) -> None:
        """Start the standbys that are missing; no effect after `close`, or while a death of one
        makes the next start wait.
        """
        if self._timer.pending:
            return
        while not self.closed and len(self._standbys) < self.size:
            try:
                self._start()
            except OSError as e:
                self._console.say(f"cannot start a standby process: {e}")
                self._retry_later()
                return

    def fill_later(self, seconds: float) -> None:
        """Call `fill` after a while, not now; a wait that is in progress is not shortened."""
        if not self._timer.pending:
            self._timer = self._loop.call_later(seconds, self.fill)

    def take(self, worker: dict[str, str], descriptors: Sequence[int]) -> Standby | None:
        """Make a standby a worker with this environment, stdout and stderr; `None` if none is
        ready. It is the caller's from then on.
        """
        for pid, standby in list(self._standbys.items()):
            if standby.ready and self._tell(standby, worker, descriptors):
                del self._standbys[pid]
                self._loop.unwatch(standby.channel.fileno())
                standby.channel.close()
                self._deaths = 0
                self.fill_later(_AFTER_USE_S)
                return standby
        return None

    def _tell(self, standby: Standby, worker: dict[str, str], descriptors: Sequence[int]) -> bool:
        changes = {k: v for k, v in worker.items() if standby.environment.get(k) != v}
        message = json.dumps({"environment": changes}).encode()
        if len(message) > PACKET:
            return False
        try:
            socket.send_fds(standby.channel, [message], descriptors)
        except OSError:
            return False  # it has just died, and is not reaped yet
        return True

    def ended(self, pid: int, exit_code: int) -> bool:
        """Note the end of a reaped process; returns whether it was a standby."""
        standby = self._standbys.pop(pid, None)
        if standby is None:
            return False
        standby.process.returncode = exit_code  # otherwise subprocess would wait for it again
        kill_group(pid)
        if standby.channel.fileno() < 0:  # ended by `close`; perhaps the pool is open again
            self.fill_later(_AFTER_USE_S)
            return True
        if not standby.answered:
            self._read(standby)  # the end may be seen before the last message
        self._loop.unwatch(standby.channel.fileno())
        standby.channel.close()
        if standby.answered and not standby.ready:
            self.fill()  # the next one leaves that import to the script
            return True
        self._deaths += 1
        if self._deaths > len(_BACKOFF_S) and not standby.ready:
            self.size = 0
            self._console.say("standby processes die before they are ready: no more are started")
        self._retry_later()
        return True

    def close(self) -> None:
        """End all standbys; none is started until `open`. The caller reaps them (`ended`)."""
        self.closed = True
        self._timer.cancel()
        for standby in self._standbys.values():
            if standby.channel.fileno() < 0:
                continue
            self._loop.unwatch(standby.channel.fileno())
            standby.channel.close()  # the end of the stream: one that waits exits
            if not standby.ready:
                standby.process.kill()

    def _retry_later(self) -> None:
        self.fill_later(_BACKOFF_S[min(max(1, self._deaths), len(_BACKOFF_S)) - 1])

    def _start(self) -> None:
        job = self._job
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = environment.standby_environment(job)
        settings = Settings(
            descriptor=theirs.fileno(),
            target=job.program.name,
            arguments=list(job.program.args),
            as_module=job.program.module,
            chaos=job.chaos is not None,
            limit=self._limit,
        )
        command = [environment.python(), "-u", _PROGRAM, json.dumps(dataclasses.asdict(settings))]
        with theirs:
            try:
                process = subprocess.Popen(
                    [*exec_shim.command(), *command],
                    env=given,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        standby = Standby(process, ours, given)
        self._standbys[process.pid] = standby
        self._loop.watch(ours.fileno(), selectors.EVENT_READ, lambda: self._on_message(standby))

    def _on_message(self, standby: Standby) -> None:
        if not self._read(standby):
            self._loop.unwatch(standby.channel.fileno())  # its end follows

    def _read(self, standby: Standby) -> bool:
        try:
            data = standby.channel.recv(PACKET)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        standby.answered = True
        answer = json.loads(data)
        pid, script = standby.process.pid, self._job.program.name
        if answer["ready"]:
            standby.ready = True
            line = answer["ends_at"]
            early = (
                f", but without the imports below line {line} of {script}: that line may change "
                "what an import does, so move them above it"
            )
            self._console.say(f"standby pid {pid} is ready{early if line else ''}")
        elif answer["limit"] < self._limit:
            self._limit = answer["limit"]
            self._console.say(
                f"standby processes import nothing from here on: {answer['reason']}; a replacement "
                "takes longer by what that imports"
            )
        return True

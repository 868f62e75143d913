"""One host: Linux namespaces that share a network, process IDs, a name, a clock and memory.

`network.py` makes hosts and connects them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount", "--time")

# The first process of a host: the kernel kills all others when it ends. It lives until the pipe is
# closed (a shell's `read` also ends by signals); as it ignores SIGCHLD, the kernel reaps orphans.
_INIT = """
mount -t proc proc /proc && mount -t tmpfs shm /dev/shm && hostname {name} && ip link set lo up &&
{more} && echo ready &&
exec env --ignore-signal=CHLD cat > /dev/null
"""


class Namespaces:
    """Namespaces that live as long as this object: of a host, or of the switch."""

    def __init__(self, name: str, clock_offset_s: int, more: str) -> None:
        self.name = name
        self.clock_offset_s = clock_offset_s
        clock = ("--monotonic", str(clock_offset_s), "--boottime", str(clock_offset_s))
        script = _INIT.format(name=name, more=more)
        command = ["unshare", *_NAMESPACES, *clock, "--fork", "--kill-child", "sh", "-c", script]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            _, error = self._process.communicate()
            raise RuntimeError(f"{name} does not start: {error.decode().strip()}")
        self.init = _only_child(self._process)
        self._pid_namespace = os.readlink(f"/proc/{self.init}/ns/pid")

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def on(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends all processes, and with them the namespaces."""
        if self.on:
            os.kill(self.init, signal.SIGKILL)  # the kernel kills the others, also stopped ones
            self._reap()
        self._process.communicate()

    def _reap(self) -> None:
        """Waits for the ends of processes that were started from outside."""

    def ip(self, *commands: str) -> None:
        """Runs commands of `ip` inside."""
        run(
            f"nsenter --target {self.init} --net ip -batch -",
            "".join(f"{command}\n" for command in commands),
        )

    def pids(self) -> list[int]:
        """All processes inside but the first, with the process IDs that they have outside."""
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):  # it has ended
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == self._pid_namespace:
                    found.append(int(name))
        return [pid for pid in found if pid != self.init]


class Host(Namespaces):
    """A host: `Network.boot` makes it.

    Attributes:
        name: its host name.
        address: its IP address, on its interface eth0.
        clock_offset_s: how far its monotonic clock is ahead of the machine's.
    """

    def __init__(
        self, name: str, address: str, clock_offset_s: int, more: str, unplug: Callable[[], None]
    ) -> None:
        super().__init__(name, clock_offset_s, more)
        self.address = address
        self._unplug = unplug
        self._started: list[HostProcess] = []

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> HostProcess:
        """Starts a process on this host, in a session of its own."""
        popen = subprocess.Popen(
            ["nsenter", "--target", str(self.init), *_NAMESPACES, "--", *command],
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        return self.adopt(popen)

    def adopt(self, outer: Outer) -> HostProcess:
        """Counts a process that was started on this host in another way."""
        self._started.append(HostProcess(outer))
        return self._started[-1]

    def _reap(self) -> None:
        # The kernel waits until nsenter has reaped its child.
        for process in self._started:
            process.end()

    def power_off(self) -> None:
        """Ends the host at once: first its link, so that no process says goodbye to its peers."""
        self._unplug()
        self.close()

    def freeze(self) -> None:
        """Stops all of its processes, as a host does that swaps, or whose hypervisor pauses it."""
        stopped: set[int] = set()
        while new := set(self.pids()) - stopped:  # a process may have started others meanwhile
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= new
        for process in self._started:
            process.await_stop()

    def thaw(self) -> None:
        """Continues all of its processes."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for process in self._started:
            process.send_signal(signal.SIGCONT)


class Outer(Protocol):
    """What waits outside for a process on a host, and exits with its code: `Popen` of nsenter."""

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


class HostProcess:
    """A process on a host, with the part of `subprocess.Popen` that is needed."""

    def __init__(self, outer: Outer) -> None:
        self._outer = outer
        self.stdout = outer.stdout
        self.stderr = outer.stderr
        self.pid = _only_child(outer)  # 0 if it has ended already

    def poll(self) -> int | None:
        return self._outer.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._outer.wait(timeout)

    def end(self) -> None:
        """Waits for its end, after that of its host."""
        while self.poll() is None:
            if _state(self._outer.pid) == "T":  # it does not see the end of its child
                self._outer.kill()
            time.sleep(0.001)

    def send_signal(self, number: int) -> None:
        if self.poll() is not None or not self.pid:
            return
        if number == signal.SIGSTOP:
            self.await_stop()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        if number == signal.SIGCONT:
            self._outer.send_signal(number)

    def await_stop(self) -> None:
        """Waits until it is stopped, and nsenter too, which stops together with its child.

        An nsenter that was continued a moment ago may continue its child only now, after the
        signal: then this sends it again.
        """
        while self.poll() is None and (_state(self._outer.pid), _state(self.pid)) != ("T", "T"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGSTOP)
            time.sleep(0.001)


def _state(pid: int) -> str:
    """The state of a process in one letter, as `ps` shows it; an empty string if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _only_child(process: Outer) -> int:
    """The process that `unshare` or `nsenter` has started; 0 if it has ended already."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:  # no event tells of the fork
        with contextlib.suppress(OSError):
            if found := children.read_text().split():
                return int(found[0])
        time.sleep(0.001)
    return 0


def run(command: str, text: str | None = None) -> None:
    """Runs a command of the system, with `text` as its input.

    Raises:
        RuntimeError: with the command and what it said, if it fails.
    """
    done = subprocess.run(shlex.split(command), input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip() or done.stdout.strip()}")

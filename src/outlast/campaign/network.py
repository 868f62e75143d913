"""Hosts on this machine: each has its own network, processes, name and shared memory.

A host is a set of Linux namespaces, and a link to a switch, which is one more namespace. Files are
shared, except /dev/shm and /etc/hosts. The machine's own network is not touched: all addresses and
routes are inside of namespaces made here. They end with a pipe that their first process reads, so
that nothing is left even if this process is killed. Needs root, `unshare`, `nsenter` and `ip`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_GATEWAY = "10.78.0.254"
_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
# The first process of a host: the kernel kills all others when it ends.
_INIT = """
trap '' CHLD  # orphans are reaped
mount -t proc proc /proc && mount -t tmpfs shm /dev/shm && hostname {name} && ip link set lo up &&
{more} && echo ready &&
exec cat > /dev/null  # until the pipe is closed
"""


class NetworkError(Exception):
    """The namespaces cannot be made."""


class _Namespaces:
    """Namespaces that live until `close`: of a host, or of the switch."""

    def __init__(self, name: str, more: str) -> None:
        script = _INIT.format(name=name, more=more)
        self._process = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            _, error = self._process.communicate()
            raise NetworkError(f"{name} does not start: {error.decode().strip()}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.init = int(children.read_text().split()[0])

    def ip(self, *commands: str) -> None:
        batch = "".join(f"{command}\n" for command in commands)
        _run(f"nsenter --target {self.init} --net ip -batch -", batch)

    def close(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init, signal.SIGKILL)
        self._process.communicate()


class Network:
    """Hosts h1, h2, ... with the addresses 10.78.0.1, 10.78.0.2, ..., and a switch between them."""

    def __init__(self, count: int, folder: Path) -> None:
        self.names = tuple(f"h{number}" for number in range(1, count + 1))
        self._hosts_file = folder / "hosts"
        lines = [f"{self._address(name)} {name}" for name in self.names]
        self._hosts_file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._hosts: dict[str, _Namespaces] = {}
        self._switch = _Namespaces("switch", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        try:
            for name in self.names:
                self.boot(name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()
        self._switch.close()

    def boot(self, name: str) -> None:
        """Starts a host, which was never on or has been powered off."""
        mounts = f"mount --bind {shlex.quote(str(self._hosts_file))} /etc/hosts"
        host, port, address = _Namespaces(name, mounts), f"p-{name}", self._address(name)
        self._hosts[name] = host
        ends = f"{port} netns {self._switch.init} type veth peer name eth0 netns {host.init}"
        _run(f"ip link add {ends}")
        self._switch.ip(
            f"address add {_GATEWAY}/32 dev {port}",
            f"link set {port} up",
            f"route add {address}/32 dev {port}",
        )
        host.ip(
            f"address add {address}/32 dev eth0",
            "link set eth0 up",
            f"route add default via {_GATEWAY} dev eth0 onlink",
        )

    def power_off(self, name: str) -> None:
        """Ends a host at once: first its link, so that no process says goodbye to its peers."""
        with contextlib.suppress(NetworkError):  # it had none yet
            self._switch.ip(f"link delete p-{name}")
        self._hosts.pop(name).close()

    def cut_off(self, name: str) -> None:
        """Loses silently all that a host sends and receives."""
        self._switch.ip(*(f"rule add {direction}" for direction in self._directions(name)))

    def connect(self, name: str) -> None:
        """Ends that."""
        self._switch.ip(*(f"rule delete {direction}" for direction in self._directions(name)))

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Starts a process on a host; what is returned exits with its exit code."""
        target = ["nsenter", "--target", str(self._hosts[name].init), *_NAMESPACES, "--"]
        return subprocess.Popen(
            [*target, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _address(self, name: str) -> str:
        return f"10.78.0.{name.removeprefix('h')}"

    def _directions(self, name: str) -> list[str]:
        # Routes of this type drop packets without an answer to their sender.
        address = self._address(name)
        return [f"from {address} blackhole", f"to {address} blackhole"]


def unavailable() -> str:
    """Why this machine cannot make such hosts; an empty string if it can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"there is no command {missing[0]!r} (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with tempfile.TemporaryDirectory(prefix="outlast-hosts-") as folder:
            network = Network(2, Path(folder))
            try:
                network.cut_off("h1")
                network.connect("h1")
            finally:
                network.close()
    except (NetworkError, OSError) as error:
        return f"network namespaces cannot be made: {error}"
    return ""


def _run(command: str, text: str | None = None) -> None:
    done = subprocess.run(shlex.split(command), input=text, capture_output=True, text=True)
    if done.returncode:
        output = done.stderr.strip() or done.stdout.strip()
        raise NetworkError(f"`{command}` failed: {output}")

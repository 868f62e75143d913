"""Hosts on one machine: each has its own network, processes, name, clock and shared memory.

    with Network(["h1", "h2", "h3"]) as network:
        process = network["h1"].start(["hostname"], stdout=subprocess.PIPE)
        network.cut("h1", "h2")         # what h1 sends to h2 is lost, but not what h2 sends to h1
        network.heal()
        network["h2"].power_off()       # its link and all of its processes are gone at once
        network.boot("h2")              # a fresh host with the same name and address

A host is a set of Linux namespaces, and a link to a switch, which is one more namespace. Files are
shared, except /dev/shm and /etc/hosts. The machine's own network is not touched. A host ends with
the pipe that its first process reads, so that nothing is left even if this process is killed.

Needs root, or `unshare --user --map-root-user`; `become_root()` starts the program again with that.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from host import Host, Namespaces, run

_GATEWAY = "10.77.0.254"
_SPREAD_S = 100_000
"""Monotonic clocks of different hosts have nothing in common; here they differ by this much."""


class Network:
    """Hosts and the switch between them.

    Args:
        names: the names of the hosts that exist from the beginning; `boot` adds others.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._hosts: dict[str, Host] = {}
        self._numbers: dict[str, int] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Network:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-"))
            self._hosts_file = Path(folder) / "hosts"
            self._write_hosts_file()
            routing = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            self._switch = stack.enter_context(Namespaces("switch", 0, routing))
            stack.callback(self._power_off_all)
            for name in self.names:
                self.boot(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Host:
        """The host of that name that was booted last."""
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        """The hosts that are on."""
        return iter([host for host in self._hosts.values() if host.on])

    def address(self, name: str) -> str:
        """The address of a host, which it keeps for life; /etc/hosts maps its name to it."""
        return f"10.77.0.{self._number(name)}"

    def boot(self, name: str) -> Host:
        """Starts a host; one that was powered off comes back with its name and address."""
        assert name not in self._hosts or not self._hosts[name].on, f"{name} is on"
        number = self._number(name)
        offset_s = number * _SPREAD_S
        mounts = f"mount --bind {shlex.quote(str(self._hosts_file))} /etc/hosts"
        port = f"p{number}"
        host = Host(
            name,
            self.address(name),
            offset_s,
            mounts,
            unplug=lambda: self._switch.ip(f"link delete {port}"),
        )
        try:
            ends = f"{port} netns {self._switch.init} type veth peer name eth0 netns {host.init}"
            run(f"ip link add {ends}")
            self._switch.ip(
                f"address add {_GATEWAY}/32 dev {port}",
                f"link set {port} up",
                f"route add {host.address}/32 dev {port}",
            )
            host.ip(
                f"address add {host.address}/32 dev eth0",
                "link set eth0 up",
                f"route add default via {_GATEWAY} dev eth0 onlink",
            )
        except BaseException:
            host.close()
            raise
        self._hosts[name] = host
        return host

    # ------------------------------------------------------------------------ the network

    def cut(self, source: str, target: str) -> None:
        """Loses silently what `source` sends to `target`, but not the other direction."""
        if (source, target) not in self._cuts:
            self._cuts.add((source, target))
            self._switch.ip(f"rule add {self._direction(source, target)}")

    def part(self, some: Collection[str], others: Collection[str]) -> None:
        """Loses all that hosts of two groups send to each other."""
        for one in some:
            for other in others:
                self.cut(one, other)
                self.cut(other, one)

    def isolate(self, *names: str) -> None:
        """Loses all that these hosts and the other hosts send to each other."""
        self.part(names, [name for name in self._numbers if name not in names])

    def mend(self, source: str, target: str) -> None:
        """Undoes the cut of one direction."""
        if (source, target) in self._cuts:
            self._cuts.remove((source, target))
            self._switch.ip(f"rule delete {self._direction(source, target)}")

    def heal(self) -> None:
        """Undoes all cuts."""
        for source, target in list(self._cuts):
            self.mend(source, target)

    @property
    def cuts(self) -> frozenset[tuple[str, str]]:
        """The directions that are cut: source and target."""
        return frozenset(self._cuts)

    @property
    def switch(self) -> Namespaces:
        """What connects the hosts."""
        return self._switch

    # ---------------------------------------------------------------------------- private

    def _direction(self, source: str, target: str) -> str:
        # A route of this type drops packets without an answer to their sender.
        return f"from {self.address(source)} to {self.address(target)} blackhole"

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers) + 1
            self._write_hosts_file()
        return self._numbers[name]

    def _write_hosts_file(self) -> None:
        lines = [f"10.77.0.{number} {name}" for name, number in self._numbers.items()]
        # In place: hosts that are on have this file mounted.
        self._hosts_file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def _power_off_all(self) -> None:
        for host in self:
            host.close()


def unavailable() -> str:
    """Why this machine cannot make such hosts; an empty string if it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    try:
        with Network(["a", "b"]) as network:
            network.cut("a", "b")
            network.heal()
    except FileNotFoundError as error:
        return f"network namespaces need {error.filename!r} (packages iproute2 and util-linux)"
    except (RuntimeError, OSError) as error:
        root = "" if os.geteuid() == 0 else " without root"
        return f"network namespaces cannot be made{root}: {error}"
    return ""


def become_root() -> None:
    """Starts this program again as root of a user namespace, unless it is root.

    Raises:
        SystemExit: saying what to do, where that is not allowed.
    """
    if os.geteuid() == 0:
        return
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    try:
        allowed = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit("hosts in network namespaces need the commands `unshare` (util-linux) and `ip`")
    if allowed.returncode:
        sys.exit(
            "hosts in network namespaces need root here, because user namespaces are not allowed "
            f"({allowed.stderr.strip()}): run it with sudo, or set the sysctl "
            "user.max_user_namespaces (Ubuntu: kernel.apparmor_restrict_unprivileged_userns=0)"
        )
    os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])

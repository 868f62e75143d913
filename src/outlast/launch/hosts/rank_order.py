"""Where hosts are in the network: the key by which a job puts them in order, and ranks follow.

Each launcher finds the key of its host once, when it starts, and sends it when it joins. A key has
the levels of the network, from the outermost one inward, such as switches; then the number that
Slurm or Kubernetes has given to this launcher; then the host name.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil

from outlast.errors import LaunchError
from outlast.launch import environment
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.workers import exec_shim

_LIMIT_S = 60.0
"""How long the command of `--rank-order` may take."""
_KEY_BYTES = 256
_EXPECTED = (
    "it must print one line for this host, with the levels of the network from the outermost one "
    "inward, such as rack3.switch12"
)


def own_topology(hosts: HostsSpec) -> tuple[str, ...]:
    """The key of this host; empty if nothing is known of it. A `LaunchError` says why
    `--rank-order` has given none.
    """
    where, number = environment.topology()
    host = socket.gethostname()
    if given := hosts.rank_order:
        try:
            where = _line_of(given, host, hosts) if os.path.isfile(given) else _printed(given)
        except (OSError, ValueError) as e:
            raise LaunchError(f"--rank-order {given}: on host {host}, {e}") from e
    levels = [*_levels(where), *_levels(number)]
    return (*levels, host) if levels else ()


def _levels(text: str) -> list[str]:
    """Dots, slashes or spaces separate them."""
    return [level for level in re.split(r"[\s./]+", text) if level]


def _line_of(path: str, host: str, hosts: HostsSpec) -> str:
    """The number of this host's line in a file."""
    words = [line.split("#")[0].split() for line in Path(path).read_text().splitlines()]
    names = [line[0].lower() for line in words if line]
    found = psutil.net_if_addrs().items()
    # The address of loopback is the same on all hosts.
    own = {each.address for name, addresses in found if name != "lo" for each in addresses}
    own |= {host.lower(), (hosts.local_addr or host).lower()}
    numbers = [n for n, name in enumerate(names) if name in own]
    if not numbers:  # one of the two may be a full name
        short = [name.partition(".")[0] for name in names]
        numbers = [n for n, name in enumerate(short) if name == host.lower().partition(".")[0]]
    if len(numbers) != 1:
        raise ValueError(
            f"{len(numbers)} of the {len(names)} hosts in this file are this one. It must have one "
            "line for each host, with its name or address, spares included; to run it as a "
            f"program, write: sh {path}"
        )
    return str(numbers[0])


def _printed(command: str) -> str:
    """The line that a command prints. It runs as the user of the launcher, in a shell."""
    shell = [*exec_shim.command(), "/bin/sh", "-c", command]
    # Not a pipe: what the command leaves running would keep it open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            shell,
            env=environment.checks_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            start_new_session=True,
        )
        try:
            code = process.wait(_LIMIT_S)
        except BaseException as e:  # also a signal that ends this launcher
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            raise ValueError(f"the command has not ended within {_LIMIT_S:g} s") from e
        output.seek(0)
        line = output.read(_KEY_BYTES + 1).decode(errors="replace").strip()
    if code:
        raise ValueError(f"the command has ended with exit code {code} (no file has this name)")
    if not _levels(line) or "\n" in line or len(line) > _KEY_BYTES:
        raise ValueError(f"the command has printed {line[:80]!r}, and {_EXPECTED}")
    return line

"""A real Slurm cluster on hosts in network namespaces: controller, node daemons, authentication."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from host import Host, HostProcess
from network import Network

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scontrol")
_NODE = "NodeName={name} NodeAddr={address} CPUs=4 State=UNKNOWN"
_CONF = """
ClusterName=tests
SlurmctldHost={controller}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=2
KillWait=30
{nodes}
PartitionName=p Nodes={names} Default=YES State=UP
"""
_READY_S = 60.0


def unavailable() -> str:
    """Why there can be no cluster here; an empty string if there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"Slurm is not installed here: no {', '.join(missing)} (make services)" * bool(missing)


class SlurmCluster:
    """The first host of `network` is the controller, and the others are the nodes.

    The daemons run in the foreground, as processes of their hosts, and end with them.

    Args:
        switches: the nodes at each switch, below one at the top; empty for none.
    """

    def __init__(
        self, network: Network, folder: Path, switches: Mapping[str, str] | None = None
    ) -> None:
        self.network = network
        self.controller, *self.nodes = network
        self._folder = folder
        self._stack = contextlib.ExitStack()
        folder.mkdir()
        for part in ("state", *(f"spool/{node.name}" for node in self.nodes)):
            (folder / part).mkdir(parents=True)
        names = ",".join(node.name for node in self.nodes)
        nodes = "\n".join(_NODE.format(name=n.name, address=n.address) for n in self.nodes)
        controller = self.controller
        conf = _CONF.format(
            controller=controller.name,
            address=controller.address,
            folder=folder,
            nodes=nodes,
            names=names,
        )
        if switches:
            conf += "TopologyPlugin=topology/tree\n"
            lines = [f"SwitchName={name} Nodes={below}" for name, below in switches.items()]
            lines.append(f"SwitchName=top Switches={','.join(switches)}")
            (folder / "topology.conf").write_text("\n".join(lines) + "\n")
        (folder / "slurm.conf").write_text(conf)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "key").write_bytes(os.urandom(64))
        (folder / "key").chmod(0o600)
        self.env = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        folder = self._folder
        # munged does without its checks of the folder, which is below /tmp.
        munge = ["munged", "--foreground", "--force", f"--key-file={folder}/key"]
        munge += [f"--{part}={folder}/munge.{part[:4]}" for part in ("pid-file", "seed-file")]
        munge += [f"--socket={folder}/munge.sock", f"--log-file={folder}/munge.log"]
        self._daemon(self.controller, munge)
        self._until("munged", lambda: (folder / "munge.sock").exists())
        self._daemon(self.controller, ["slurmctld", "-D"])
        for node in self.nodes:
            self._daemon(node, ["slurmd", "-D", "-N", node.name])
        self._until("the nodes", self._all_idle)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def srun(
        self,
        options: Sequence[str],
        command: Sequence[str],
        output: Path,
        env: Mapping[str, str] | None = None,
    ) -> HostProcess:
        """Starts `srun` on the controller; both streams of all tasks go to `output`."""
        with output.open("wb") as file:
            return self.controller.start(
                ["srun", *options, *command],
                env={**self.env, **(env or {})},
                cwd=self._folder,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def ask(self, *command: str) -> str:
        """What a command of Slurm, on the controller, prints."""
        process = self.controller.start(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        with process.stdout as stream:
            text = stream.read().decode()
        process.wait()
        return text

    def _daemon(self, host: Host, command: Sequence[str]) -> None:
        log = self._stack.enter_context((self._folder / f"{command[0]}.out").open("ab"))
        daemon = host.start(command, env=self.env, stdout=log, stderr=log)
        self._stack.callback(daemon.wait)
        # In order: slurmctld's helper kills the parent that it is given when slurmctld is killed.
        self._stack.callback(daemon.send_signal, signal.SIGTERM)

    def _all_idle(self) -> bool:
        states = self.ask("sinfo", "--noheader", "--Node", "--format=%T").split()
        return len(states) == len(self.nodes) and set(states) == {"idle"}

    def _until(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _READY_S
        while not ready():
            if time.monotonic() > deadline:
                logs = "\n".join(p.read_text()[-2000:] for p in sorted(self._folder.glob("*.log")))
                raise AssertionError(f"{what}: not ready within {_READY_S} s\n{logs}")
            time.sleep(0.1)

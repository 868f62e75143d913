"""Three hosts train; one leaves, that of the store loses power, then another: equal weights.

    make demo-hosts                    the agents keep the store themselves
    make demo-hosts BACKEND=etcd       three etcd members keep it, one a host

A fourth host is a spare. A host that has left or lost power comes back as a fresh one, which runs
the same command, as a cluster manager would have it. All hosts are namespaces on this machine: see
`network.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from etcd import Etcd
from host import HostProcess
from network import Network, become_root, unavailable

NAMES = ("h1", "h2", "h3")  # the endpoints
HOSTS = (*NAMES, "h4")
TRAIN = Path(__file__).parent / "train.py"
LIMIT_S = 120.0

T = TypeVar("T")


class Demo:
    """A job on three hosts, and what it has written so far.

    Args:
        network: with the hosts.
        folder: for checkpoints, events and the output of the agents.
        etcd: the cluster that keeps the store; `None` if the agents keep it.
    """

    def __init__(self, network: Network, folder: Path, etcd: Etcd | None) -> None:
        self.network = network
        self.folder = folder
        self.etcd = etcd
        self.agents: dict[str, HostProcess] = {}
        self.go = folder / "go"
        self.begin = time.monotonic()
        (folder / "trace").mkdir()

    def start(self, name: str) -> None:
        """Starts what every host runs: an agent, and with etcd a member of it."""
        if self.etcd is not None and name in NAMES:
            self.etcd.start(name)
        command = [sys.executable, "-m", "outlast.launch", "run", "--nnodes", str(len(NAMES))]
        options = ["--standby", "0", *self.job()]
        events = ["--events-dir", str(self.folder / "events")]
        script = [str(TRAIN), "--state", str(self.folder / "state")]
        # The pauses end with the last of the faults.
        trace = ["--trace", str(self.folder / "trace"), "--pause", "0.2", "--go", str(self.go)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.agents[name] = self.network[name].start(
                [*command, *options, *events, *script, *trace], stdout=log, stderr=log
            )

    def job(self) -> list[str]:
        """The options by which a command finds the job."""
        if self.etcd is None:
            endpoints = ",".join(f"{name}:29400" for name in NAMES)
            return ["--rdzv-id", "demo", "--rdzv-endpoint", endpoints]
        etcd = ["--rdzv-backend", "etcd", "--rdzv-endpoint", self.etcd.endpoints]
        return ["--rdzv-id", "demo", *etcd]

    def spare(self) -> str:
        """The host that runs no ranks."""

        def found() -> str | None:
            logs = {name: (self.folder / f"{name}.log").read_text() for name in HOSTS}
            return next((n for n, log in logs.items() if "this one is a spare" in log), None)

        return self.until(found, "a spare")

    def drain(self, name: str) -> None:
        """Has a host leave the job in order; its launcher ends with exit code 0."""
        command = [sys.executable, "-m", "outlast.launch", "drain", name, *self.job()]
        asked = self.network[name].start(command, stdout=subprocess.DEVNULL)
        if asked.wait() or self.agents[name].wait():
            sys.exit(f"{name} has not left in order: see {self.folder / name}.log")

    def lose(self, name: str) -> None:
        """Ends a host, and starts a fresh one in its place."""
        self.network[name].power_off()
        self.agents[name].wait()
        time.sleep(1.0)  # a real one takes longer
        self.network.boot(name)
        self.start(name)

    def leader(self) -> str:
        """The host of the store: of etcd's leader, or of the agents'."""
        if self.etcd is not None:
            return self.etcd.leader()
        return self.until(self._leading_agent, "a leader of the hosts")

    def _leading_agent(self) -> str | None:
        found = [
            (int(term), name)
            for log in self.folder.glob("*.log")
            for name, term in re.findall(r"(\w+) leads the hosts \(term (\d+)\)", log.read_text())
        ]
        return max(found)[1] if found else None

    def until_step(self, step: int) -> tuple[int, int]:
        """Waits for this step or a later one, made from now on; returns it and the world size."""
        now = time.monotonic()

        def found() -> tuple[int, int] | None:
            for file in (self.folder / "trace").iterdir():
                for line in file.read_text().splitlines(keepends=True):
                    made = json.loads(line) if line.endswith("\n") else {"step": -1}
                    if made["step"] >= step:
                        ahead = self.network[made["host"]].clock_offset_s
                        if made["time"] - ahead > now:
                            return made["step"], made["size"]
            return None

        return self.until(found, f"step {step}")

    def until(self, found: Callable[[], T | None], what: str) -> T:
        """The first result of `found`; ends the demo if an agent ends, or after a long time."""
        deadline = time.monotonic() + LIMIT_S
        while (value := found()) is None:
            ended = [name for name, agent in self.agents.items() if agent.poll()]
            if ended or time.monotonic() > deadline:
                for name in ended or HOSTS:
                    log = (self.folder / f"{name}.log").read_text()
                    print(f"--- {name}\n{log[-3000:]}", file=sys.stderr)
                sys.exit(f"no {what}: " + (f"{ended} failed" if ended else "waited too long"))
            time.sleep(0.05)
        return value

    def say(self, text: str) -> None:
        """Prints a line of the story."""
        print(f"{time.monotonic() - self.begin:5.1f} s  {text}", flush=True)

    def play(self) -> str:
        """The story; returns the hash of the weights."""
        for name in HOSTS:
            self.start(name)
        self.say(f"{', '.join(HOSTS)} run `outlast run --nnodes {len(NAMES)} ... train.py`")
        spare = self.spare()
        step, size = self.until_step(20)
        leaves = next(name for name in NAMES if name not in (spare, self.leader()))
        self.say(f"step {step} on {size} hosts, {spare} is a spare; `outlast drain {leaves}`")
        self.drain(leaves)
        self.say(f"{leaves} has left with exit code 0; a fresh one runs the same command")
        self.start(leaves)
        step, size = self.until_step(step + 20)
        first = self.leader()
        self.say(f"step {step} on {size} hosts; {first}, which leads the store, loses power")
        self.lose(first)
        self.say(f"a fresh {first} runs the same command")
        step, size = self.until_step(step + 20)
        second = next(name for name in reversed(NAMES) if name not in (first, self.leader()))
        self.say(f"step {step} on {size} hosts; {second} loses power")
        self.lose(second)
        self.say(f"a fresh {second} runs the same command")
        self.go.touch()
        self.until(lambda: all(agent.poll() == 0 for agent in self.agents.values()) or None, "end")
        self.say("all agents have ended with exit code 0")
        logs = "".join(log.read_text() for log in self.folder.glob("*.log"))
        return str(re.findall(r"weights (\w+)", logs)[-1])


def undisturbed(folder: Path) -> str:
    """The hash of the weights of a run in one process, without hosts and without faults."""
    command = [sys.executable, str(TRAIN), "--state", str(folder / "undisturbed"), "--pause", "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()[-1]


def main() -> None:
    """Plays the story, and prints the report of the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the files of the demo; removed first")
    parser.add_argument("--backend", choices=["c10d", "etcd"], default="c10d")
    options = parser.parse_args()
    become_root()
    if reason := unavailable():
        sys.exit(reason)
    if options.backend == "etcd" and shutil.which("etcd") is None:
        sys.exit("there is no etcd here: install it (Debian: apt-get install etcd-server)")
    os.environ["OMP_NUM_THREADS"] = "1"
    folder: Path = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    expected = undisturbed(folder)
    print(f"A run without faults, in one process, ends with the weights {expected}.")
    with Network(HOSTS) as network:
        etcd = Etcd(network, NAMES, folder / "etcd") if options.backend == "etcd" else None
        weights = Demo(network, folder, etcd).play()
    print(f"The run on three hosts, one left and two died, ends with the weights {weights}.\n")
    report = [sys.executable, "-m", "outlast.launch", "report", str(folder / "events")]
    subprocess.run(report, check=True)
    if weights != expected:
        sys.exit("the weights differ")


if __name__ == "__main__":
    main()

"""Store histories: real agents' groups in network namespaces, random calls on their store, and
random faults; see `history` for what is checked.

In the *live* mode, a majority of the hosts is connected at the end and all others stay cut off or
without power. Each host of the majority must then perform a write within `bound_s`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
from host import HostProcess
from network import Network, unavailable

from outlast.coordination.replicated.quorum import Timing
from outlast.launch.hosts.replicated.past import Group, Past

from ..calls import Calls
from ..crash_states import Result
from ..one_trial import one_trial
from . import clock, members, shaker
from .faults import Faults, plan
from .history import History
from .host_program import Settings, true_now

TESTS = Path(__file__).parents[2]
LEASE_S = 2.0
FAULTS_S = 14
_FIRST_S = 60.0
_PORT = 29400
_LOAD = 4
"""How much slower than an idle machine this one may be."""


def bound_s(lease_s: float) -> float:
    """How long a connected majority may take, on an idle machine. In the worst case: its leases of
    the old group end; what was last founded is over, and its leases too, before endpoints found
    another; and the address of each host is free again. Each takes as long as a host may be silent.
    One more for what was sent into a cut and is sent again, and one for the election.
    """
    return 5 * Timing(lease=lease_s).lost_after


class Hosts:
    """The host programs of a trial; see `faults.Agents`."""

    def __init__(
        self, network: Network, folder: Path, seed: int, library: str, backend: str
    ) -> None:
        self._backend = backend
        self._network, self._folder, self._seed = network, folder, seed
        self._processes: dict[str, HostProcess] = {}
        self._starts = 0
        self._library = library
        r = random.Random(f"rates/{seed}")
        # The product promises to stand rates that differ by a fifth.
        slow = library and r.random() < 0.6
        self._rates = {n: r.choice([0.92, 1.0, 1.09]) if slow else 1.0 for n in network.names}

    def start(self, host: str) -> None:
        self._starts += 1
        settings = Settings(
            name=host,
            number=self._starts,
            seed=self._seed,
            backend=self._backend,
            endpoints=[(name, _PORT) for name in self._network.names[:3]]
            if self._backend == "c10d"
            else [(name, 2379) for name in members.NAMES],
            lease_s=LEASE_S,
            record_dir=str(self._folder / "records" / host),
            log=str(self._folder / f"{host}.log"),
            clock_offset_s=self._network[host].clock_offset_s,
            pause_s=0.04,
        )
        paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}
        if (rate := self._rates[host]) != 1.0:
            base = time.monotonic() + self._network[host].clock_offset_s
            env |= clock.environment(self._library, rate, base)
        command = [sys.executable, "-m", "torture.hosts.host_program"]
        command.append(json.dumps(dataclasses.asdict(settings)))
        with (self._folder / f"{host}.out").open("ab") as out:
            self._processes[host] = self._network[host].start(
                command, env, self._folder, stdout=out, stderr=out
            )

    def kill(self, host: str) -> None:
        process = self._processes.pop(host)
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def pause(self, host: str) -> None:
        self._processes[host].send_signal(signal.SIGSTOP)

    def resume(self, host: str) -> None:
        self._processes[host].send_signal(signal.SIGCONT)

    def drain(self, host: str) -> None:
        """There are no jobs here."""

    def join_again(self, host: str) -> None:
        """Nothing has left."""

    def ended(self) -> list[str]:
        """The hosts that are on and whose program has ended by itself."""
        running = self._processes.items()
        return [h for h, p in running if self._network[h].on and p.poll() is not None]


def why_not() -> str:
    """Why there can be no such trial here; an empty string if there can."""
    return unavailable()


def try_safety(calls: Calls | None, seed: int, until: float, most: int | None) -> Result:
    """One trial of the safety of the store, with faults for `most` seconds."""
    return one_trial("safety", seed, partial(_trial, seconds=most or FAULTS_S, live=False))


def try_etcd(calls: Calls | None, seed: int, until: float, most: int | None) -> Result:
    """One trial of the store on etcd, whose three members are on hosts with faults, too. At the end
    all is healed, and each host must write.
    """
    trial = partial(_trial, seconds=most or FAULTS_S, live=True, backend="etcd")
    return one_trial("etcd", seed, trial)


def try_liveness(calls: Calls | None, seed: int, until: float, most: int | None) -> Result:
    """One trial of its liveness too."""
    return one_trial("liveness", seed, partial(_trial, seconds=most or FAULTS_S, live=True))


def _trial(
    folder: Path, r: random.Random, *, seconds: float, live: bool, backend: str = "c10d"
) -> tuple[int, list[str]]:
    """One trial: the number of calls that were made, and the violations."""
    names = [f"h{n + 1}" for n in range(r.choice([3, 5]) if backend == "c10d" else 3)]
    all_names = [*names, *(members.NAMES if backend == "etcd" else ())]
    history, found = History(folder), []
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(all_names))
        shaking = None
        if not shaker.why_not():
            shaking = shaker.Shaker(network, r.randrange(1 << 30))
            stack.callback(shaking.close)
        library = stack.enter_context(clock.library())
        hosts = Hosts(network, folder, r.randrange(1 << 30), library, backend)
        agents = members.WithMembers(network, hosts, folder, backend)
        for name in names:
            hosts.start(name)
        faults = Faults(network, shaking, agents, r)
        planned = plan(r, all_names, seconds, LEASE_S)
        (folder / "faults").write_text("\n".join(map(str, planned)))
        if (late := _until_all_write(history, names, 0.0, _FIRST_S)) is not None:
            found.append(f"without a fault, {late} within {_FIRST_S} s: {_state(folder)}")
        faults.run(planned, seconds)
        if backend == "etcd":
            faults.end_all(all_names)
            found += _require_writes(folder, history, names, "all is healed")
        elif live:
            found += _check_liveness(folder, history, network, faults, r)
        found += [f"the program of {host} has ended: {_state(folder)}" for host in hosts.ended()]
        if any("cannot be kept" in path.read_text() for path in folder.glob("*.out")):
            found.append(f"hosts without a record show less: {_state(folder)}")
    history.read()
    found += history.violations()
    return len(history.calls), found


def _check_liveness(
    folder: Path, history: History, network: Network, faults: Faults, r: random.Random
) -> list[str]:
    """Heals only a connected majority, and requires progress of each of its hosts."""
    faults.isolate_all()
    time.sleep(0.2)  # what is on its way arrives
    core = _majority(folder, network, r)
    for name in network.names:
        if name not in core and network[name].on and r.random() < 0.5:
            network[name].power_off()
    faults.end_all(core)
    return _require_writes(folder, history, core, f"{core} of {network.names} are connected")


def _require_writes(folder: Path, history: History, core: list[str], why: str) -> list[str]:
    began, limit_s = true_now(0.0), _LOAD * bound_s(LEASE_S)
    late = _until_all_write(history, core, began, limit_s)
    (folder / "liveness").write_text(f"{why}: {true_now(0.0) - began:.1f} s\n")
    return [] if late is None else [f"{why}, and {late} in {limit_s} s: {_state(folder)}"]


def _until_all_write(history: History, core: list[str], since: float, limit_s: float) -> str | None:
    """Waits until each of these hosts has made a write; what is missing, if it takes too long."""
    deadline = time.monotonic() + limit_s
    while missing := set(core) - history.performed_since(since):
        if time.monotonic() > deadline:
            return f"{', '.join(sorted(missing))} has made no write"
        time.sleep(0.1)
        history.read()
    return None


def _majority(folder: Path, network: Network, r: random.Random) -> list[str]:
    """A majority that can go on: of the hosts, of the endpoints, and of the voters of every group
    that may still act as far as the records of its own hosts say. Silence of a voter proves
    nothing; so without a majority of the voters nobody may go on, by design.
    """
    names = list(network.names)
    ends = set(names[:3])
    of_address = {network.address(name): name for name in names}
    known = {name: _past(folder / "records" / name) for name in names}
    everything = Past()
    for past in known.values():
        everything = everything.merged(Past(past.groups))
    for _ in range(20):
        core = sorted(r.sample(names, len(names) // 2 + 1))
        out = frozenset[str]().union(*(known[name].out for name in core))
        groups = everything.merged(Past(out=out)).groups
        if 2 * len(ends & set(core)) > len(ends) and all(
            half.is_quorum(
                [v for v in half.voters if v in out or _at(v, group, of_address) in core]
            )
            for group in groups
            for config in (group.committed, *group.accepted)
            for half in (config.voters.new, config.voters.old)
            if half is not None
        ):
            return core
    return names


def _at(voter: str, group: Group, of_address: dict[str, str]) -> str:
    address, _ = group.addresses.get(voter, ("", 0))
    return of_address.get(address, "")


def _past(folder: Path) -> Past:
    for path in folder.glob("*.json"):
        return msgspec.convert(json.loads(path.read_bytes())["past"], Past)
    return Past()


def _state(folder: Path) -> str:
    """What each host has said last."""
    shown = []
    for path in sorted(folder.glob("*.log")):
        lines = [
            x for x in path.read_text().splitlines() if '"call"' not in x and '"done"' not in x
        ]
        shown.append("\n".join([path.stem, *lines[-4:]]))
    for path in sorted(folder.glob("*.out")):
        shown.append(f"{path.name}: {path.read_text(errors='replace')[-1500:]}")
    return "\n".join(shown)

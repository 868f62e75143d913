"""A restart on many hosts: simulated up to 2,048 hosts, measured with real clients and servers."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.hosts.leader_rate import measure
from benchmarks.hosts.simulation import Model, restart
from benchmarks.inprocess.scale import view_changes
from benchmarks.lib.members import CountedStore, connected
from benchmarks.lib.sheets import Sheet, median, ms

__all__ = ["run", "sheets"]

RANKS = 8
"""On each host."""

_HOW = ["combined", _LEASES := "combined, read leases", _APART := "each rank by itself"]
GOAL_S = 0.5
"""For 16,384 ranks on 2,048 hosts."""


def run(quick: bool) -> dict[str, Any]:
    """Measures the leader, simulates restarts, and runs real clients over several servers."""
    rate = measure(16 if quick else 64, 5 if quick else 40)
    kernel = rate.pop("the kernel")
    # Writes cost more than reads, and are at most half of the messages.
    message = (rate["a read"] + rate["a write"]) / 2 + kernel
    operation = (rate["a batch of 8 reads"] - rate["a read"]) / 7
    model = Model(
        message=message,
        wait=rate["a wait"] + kernel,
        recall=rate["a recall"] + kernel,
        operation=operation,
    )
    simulated = []
    for hosts in (4, 16) if quick else (16, 64, 256, 2048):
        for how in _HOW if hosts <= 256 else _HOW[:2]:
            print(f"hosts: {hosts} simulated, {how}", flush=True)
            begun = time.monotonic()
            combined, leases = how != _APART, how == _LEASES
            outcome = restart(hosts, RANKS, model, combined=combined, read_leases=leases)
            found = vars(outcome) | {"hosts": hosts, "how": how}
            simulated.append(found | {"took": time.monotonic() - begun})
    with_etcd = [_with_etcd(hosts, model) for hosts in ((4, 16) if quick else (64, 512, 2048))]
    real = [_real(hosts, 8 if quick else 16, 2 if quick else 5) for hosts in (1, 4)]
    return {
        "rate": rate | {"the kernel": kernel},
        "model": dataclasses.asdict(model),
        "simulated": simulated,
        "etcd": with_etcd,
        "real": real,
    }


def _with_etcd(hosts: int, model: Model) -> dict[str, float]:
    print(f"hosts: {hosts} simulated, with etcd", flush=True)
    own, etcd = restart(hosts, RANKS, model), restart(hosts, RANKS, model, etcd=True)
    return {
        "hosts": hosts,
        "own": own.messages,
        "requests": etcd.messages,
        "events": etcd.events,
    }


def _real(hosts: int, ranks: int, restarts: int) -> dict[str, Any]:
    print(f"hosts: {hosts} servers with {ranks} clients each", flush=True)
    command = [sys.executable, "-m", "benchmarks.hosts.servers", str(hosts)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as servers:
        assert servers.stdin is not None
        assert servers.stdout is not None
        ports = json.loads(servers.stdout.readline())
        with ThreadPoolExecutor(16) as pool:
            connect = functools.partial(connected, host_server=True)
            stores = [CountedStore(store) for store in pool.map(connect, ports * ranks)]
        found = view_changes(stores, restarts)
        servers.stdin.write("\n")
        servers.stdin.flush()
        messages, operations = json.loads(servers.stdout.readline())
        del stores
        servers.stdin.close()
    return {
        "hosts": hosts,
        "ranks": ranks,
        "seconds": found["seconds"],
        "requests": found["operations"],
        "messages": messages / (restarts + 1),
        "operations": operations / (restarts + 1),
    }


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    model, rate = data["model"], data["rate"]
    rows = []
    for one in data["simulated"]:
        hosts = one["hosts"]
        goal = ("", "")
        if one["how"] == _HOW[0] and hosts == 2048:
            goal = ms(GOAL_S), "met" if one["seconds"] <= GOAL_S else "missed"
        rows.append(
            (
                one["how"],
                f"{hosts:,}",
                f"{hosts * RANKS:,}",
                f"{one['messages']:,}",
                f"{one['messages'] / hosts:.1f}",
                f"{one['operations']:,}",
                f"{(one['received_bytes'] + one['sent_bytes']) / hosts / 1024:.1f}",
                ms(one["seconds"]),
                *goal,
            )
        )
    real = [
        (
            f"{one['hosts']} x {one['ranks']}",
            ms(median(one["seconds"])),
            f"{one['requests']:.1f}",
            f"{one['messages']:.0f}",
            f"{one['operations']:.0f}",
        )
        for one in data["real"]
    ]
    micro = {name: f"{1e6 * seconds:.1f}" for name, seconds in rate.items()}
    return [
        Sheet(
            "A restart on many hosts, simulated",
            (
                "requests",
                "hosts",
                "ranks",
                "messages to the leader",
                "per host",
                "operations",
                "KiB/host",
                "modelled ms",
                "goal",
                "verdict",
            ),
            rows,
            "One fault, from its report to the last rank's entry into the function: the real "
            "recovery protocol and the real combining, with modelled time, in a job that does not "
            "wait for replacements. One way between hosts "
            f"takes {1e6 * model['network']:.0f} us, between a worker and its host's server "
            f"{1e6 * model['local']:.0f} us, a commit {1e6 * model['commit']:.0f} us; the leader "
            f"works {1e6 * model['message']:.1f} us for a message and its answer, and "
            f"{1e6 * model['operation']:.1f} us for each further operation (both from the "
            "measurement below: as many reads as writes). It performs one message after the "
            "other, and is busy nearly all of the time: the number of messages decides.",
        ),
        Sheet(
            "A restart with a store on etcd, simulated",
            (
                "hosts",
                "messages of the own store",
                "per host",
                "requests to etcd",
                "per host",
                "events",
                "per host",
            ),
            [
                (
                    f"{one['hosts']:,}",
                    *(
                        text
                        for name in ("own", "requests", "events")
                        for text in (f"{one[name]:,}", f"{one[name] / one['hosts']:.1f}")
                    ),
                )
                for one in data.get("etcd", ())
            ],
            "As above. A batch is a transaction, a wait needs no request while its key is known to "
            "be absent, and each host gets the event of each key that appears or is overwritten. "
            "Renewals of leases (two requests each) and the heartbeat rings' reads are not in it.",
        ),
        Sheet(
            "The leader's work, measured",
            ("for", "us"),
            list(micro.items()),
            "CPU time for a message with one operation (or as said) and its answer: real replicas, "
            "seven of them voters, and real encoding. The kernel's part is a receive and a send.",
        ),
        Sheet(
            "Real clients over the store servers of several hosts",
            ("hosts x clients", "ms", "operations/client", "messages upstream", "operations"),
            real,
            "Restarts of the same protocol, by threads with a rank's client, on one machine: the "
            "servers share one process, the clients another. Per restart.",
        ),
    ]

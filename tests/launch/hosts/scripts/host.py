"""One agent's membership as a process: joins the group of its arguments, then obeys its stdin.

Each line of stdin is a JSON list, a method of `Commands` with its arguments; each is answered with
a JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from outlast.errors import OutlastError
from outlast.launch.config.secret import read_secret
from outlast.launch.hosts.etcd.group import EtcdGroup
from outlast.launch.hosts.host_group import GroupSpec
from outlast.launch.hosts.plan import End, JobPlan
from outlast.launch.hosts.replicated import founding, service
from outlast.launch.hosts.replicated.group import ReplicatedGroup
from outlast.system.lease_page import LeasePage
from outlast.system.processes import readable


class Commands:
    """What a test can ask of a host."""

    def __init__(self, group: ReplicatedGroup | EtcdGroup) -> None:
        self.group = group

    def store(self, name: str, *arguments: Any) -> Any:
        """A store operation; text for bytes."""
        given = [a.encode() if isinstance(a, str) and i else a for i, a in enumerate(arguments)]
        result = getattr(self.group.store, name)(*given)
        return result.decode() if isinstance(result, bytes) else result

    def many(self, key: str, count: int) -> list[int]:
        """`count` additions of 1, one after the other."""
        return [self.group.store.add(key, 1) for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """The state of the group now."""
        state = self.group.poll()
        plan = JobPlan()
        for entry in state.chain:
            plan = plan.apply(entry)
        lost = plan.lost.values()
        leader = plan.hosts.get(state.leader)
        return {
            "hosts": [host.address for host in plan.hosts.values()],
            "lost": {loss.host.address: loss.reason for loss in lost},
            "left": [loss.host.address for loss in lost if loss.left],
            "causes": [entry.cause for entry in state.chain if isinstance(entry, End)],
            "leader": "" if leader is None else leader.address,
            "voters": self.voters(),
            "lease_ok": not state.error,
            "error": state.error,
            "refused": list(state.refused),
        }

    def voters(self) -> int:
        """How many hosts vote, as far as this one knows; 0 with etcd."""
        if isinstance(self.group, EtcdGroup):
            return 0
        membership = self.group._service._membership
        return len(membership._node.voters)

    def until(self, **wanted: Any) -> dict[str, Any]:
        """Wait until the state has these values; `hosts` and `lost` are compared as sets."""
        while True:
            state = self.state()
            reached = all(_plain(state[name]) == _plain(value) for name, value in wanted.items())
            if reached or (state["error"] and "lease_ok" not in wanted):
                return state  # a host that is out sees nothing more
            # The voters change without a notice.
            readable(self.group.wakeup_fd(), timeout=0.05 if "voters" in wanted else None)

    def slow_disk(self, fifo: str) -> None:
        """From now on, all files become durable only when somebody writes into a named pipe."""
        fsync = os.fsync

        def slow(descriptor: int) -> None:
            os.close(os.open(fifo, os.O_RDONLY))
            fsync(descriptor)

        os.fsync = slow  # type: ignore[assignment]

    def claim(self, cause: str, length: int | None = None) -> str:
        """Claims the entry after the first `length` (default: all known); returns the cause in the
        entry that is there.
        """
        while length is not None and len(self.group.poll().chain) < length:
            readable(self.group.wakeup_fd(), timeout=None)
        number = 1 + (len(self.group.poll().chain) if length is None else length)
        entry = self.group.claim(number, End(cause))
        return entry.cause if isinstance(entry, End) else type(entry).__name__

    def new_attempt(self, attempt: int) -> None:
        """The workers' keys."""
        self.group.new_attempt(attempt)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list | dict) else value


def say(**line: Any) -> None:
    """One line for the test."""
    print(json.dumps(line), flush=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    given["conf"] = {"record_dir": given.pop("record_dir")} if "record_dir" in given else {}
    given["page"] = page = LeasePage.create(Path(given.pop("folder")))
    founding.SILENCE_S = given.pop("silence_s")
    service.PROTOCOL = given.pop("protocol", service.PROTOCOL)
    given["endpoints"] = tuple((host, port) for host, port in given["endpoints"])
    if "secret" in given:
        given["secret"] = read_secret(given["secret"], None)
    given["settings"] = tuple(tuple(pair) for pair in given.get("settings", ()))
    group: ReplicatedGroup | EtcdGroup
    if given.pop("backend", "c10d") == "etcd":
        group = EtcdGroup(GroupSpec(**given))
    else:
        group = ReplicatedGroup(GroupSpec(**given))
    began = time.monotonic()
    try:
        group.start()
    except OutlastError as e:
        say(event="failed", error=str(e), seconds=time.monotonic() - began)
        return
    me = group.me
    say(
        event="joined",
        id=me.id,
        address=me.address,
        store_port=me.store_port,
        page=str(page.path),
        seconds=time.monotonic() - began,
    )
    commands = Commands(group)
    for line in sys.stdin:
        name, arguments, keywords = json.loads(line)
        if name == "close":
            group.close(**keywords)
            say(event="closed")
            return
        try:
            say(result=getattr(commands, name)(*arguments, **keywords), at=time.monotonic())
        except OutlastError as e:
            say(error=f"{type(e).__name__}: {e}", at=time.monotonic())


if __name__ == "__main__":
    main()

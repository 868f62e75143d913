"""What the hosts of a trial have logged, and whether it was allowed.

Three checks. Each is sound however slow the machine is: it compares moments at which something had
surely happened with moments at which something else had surely not.

* linearizable: the calls on each key of each group, see `linearizable`.
* one group at a time: the groups of a run can be ordered so that no host has acted, and no call
  was performed, for one group after the other had begun to.
* leases: a host did not act once another host of its group knew that it was declared lost, and no
  call that it made after that was performed. A host that has left in order is excepted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from .linearizable import NEVER, Call, TooLong, is_linearizable


class History:
    """The events of all hosts, in the order of each log. `read` takes what is new."""

    def __init__(self, folder: Path) -> None:
        self.calls: dict[str, dict[str, Any]] = {}  # by number; answered ones have "r" and "end"
        self.acts: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)  # by group
        self.lost: dict[tuple[str, str], float] = {}  # by group and host: first known
        self.joined: defaultdict[str, set[str]] = defaultdict(set)  # by group
        self.undecided = 0
        self._folder = folder
        self._places: dict[Path, int] = {}

    def read(self) -> None:
        """Reads what the hosts have written since the last time."""
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._places[path] = self._places.get(path, 0) + len(line)
                    self.take(json.loads(line))

    def take(self, event: dict[str, Any]) -> None:
        """Takes one event of `host_program`."""
        kind = event["e"]
        if kind == "call":
            self.calls[event["n"]] = event
        elif kind == "done":
            self.calls[event["n"]] |= {"r": event["r"], "end": event["t"]}
        elif kind == "join":
            self.joined[event["g"]].add(event["h"])
        elif kind == "acts":
            self.acts[event["g"]].append((event["t"], event["h"]))
        elif kind == "lost" and not event["left"]:
            key = event["g"], event["h"]
            self.lost[key] = min(event["t"], self.lost.get(key, NEVER))

    def performed_since(self, time: float) -> set[str]:
        """The names of the hosts that have made a write since then that was performed."""
        return {
            number.split(".")[0]
            for number, call in self.calls.items()
            if "end" in call and call["t"] >= time and call["op"] in ("put", "append", "add")
        }

    def violations(self) -> list[str]:
        """All that was not allowed."""
        return self._not_linearizable() + self._two_groups() + self._after_loss()

    def _not_linearizable(self) -> list[str]:
        keys: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
        for number, c in self.calls.items():
            end, result = c.get("end", NEVER), c.get("r")
            call = Call(c["op"], c["a"], c["t"], end, result, who=number)
            keys[c["g"], c["k"]].append(call)
        found = []
        for (group, key), calls in keys.items():
            try:
                if not is_linearizable(calls):
                    shown = "\n".join(map(_line, sorted(calls, key=lambda call: call.begin)))
                    found.append(f"key {key} of group {group} is not linearizable:\n{shown}")
            except TooLong:
                self.undecided += 1
                print(f"undecided: {len(calls)} calls of key {key} of group {group}", flush=True)
        return found

    def _two_groups(self) -> list[str]:
        latest: defaultdict[str, float] = defaultdict(lambda: -NEVER)  # surely acted after this
        earliest: defaultdict[str, float] = defaultdict(lambda: NEVER)  # surely acted before this
        moments = [(g, t, t) for g, acts in self.acts.items() for t, _ in acts]
        moments += [(c["g"], c["t"], c["end"]) for c in self.calls.values() if "end" in c]
        for group, begin, end in moments:
            latest[group] = max(latest[group], begin)
            earliest[group] = min(earliest[group], end)
        groups = sorted(latest, key=lambda group: earliest[group])
        return [
            f"group {one} acted at {latest[one]:.3f}, and group {other} by {earliest[other]:.3f}"
            for place, one in enumerate(groups)
            for other in groups[place + 1 :]
            if latest[one] > earliest[other]
        ]

    def _after_loss(self) -> list[str]:
        found = []
        for (group, host), known in self.lost.items():
            acts = [t for t, acting in self.acts[group] if acting == host and t > known]
            if acts:
                found.append(f"{host} acted at {max(acts):.3f}, declared lost by {known:.3f}")
            found += [
                f"{host} was declared lost by {known:.3f}, and this was performed: {call}"
                for call in self.calls.values()
                if "end" in call and (call["g"], call["h"]) == (group, host) and call["t"] > known
            ]
        return found


def _line(call: Call) -> str:
    end = f"{call.end:.6f}" if call.known else "?"
    return f"  {call.begin:.6f} {end} {call.who} {call.name} {call.argument} -> {call.result}"

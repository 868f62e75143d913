"""Faults that a rank carries out when it gets to their points: the part of a script's plan.

A fault is {"rank": 0, "at": "step 3", "do": "mark x, SIGTERM"}: its actions are carried out in
turn, once, or each time with `always`. `iteration` limits it to one iteration. The actions:
`raise`, `raise another`, `stay`, `mark NAME`, `await NAME` (until another rank has marked it),
`kill NAME` (the process that has marked it), `known` (until the request to stop is in the store),
the name of a signal, and those of the script.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outlast.coordination.ops import run
from outlast.inprocess.running_call import running_call

RANK = int(os.environ["RANK"])


def say(event: str, **fields: Any) -> None:
    """Prints an event as one line, in one write."""
    os.write(1, json.dumps({"event": event, "of": RANK, **fields}).encode() + b"\n")


def wait_until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.002)


def stop_is_known() -> bool:
    call: Any = running_call()
    return run(call.membership.stop_request()) is not None


class PlannedFaults:
    """The faults of `plan`, whose marks are files beside its checkpoints.

    Args:
        actions: the script's own actions, by name.
    """

    def __init__(self, plan: dict[str, Any], actions: Mapping[str, Callable[[], None]]) -> None:
        self._faults: list[dict[str, Any]] = plan["faults"]
        self._marks = Path(plan["path"] + "-marks")
        self._actions = actions
        self._marks.mkdir(parents=True, exist_ok=True)

    def reach(self, point: str, iteration: int) -> None:
        """Carries out the faults of this point."""
        for number, fault in enumerate(self._faults):
            if fault["rank"] != RANK or fault["at"] != point:
                continue
            if fault.get("iteration", iteration) != iteration:
                continue
            once = self._marks / f"fault {number}"
            if not fault.get("always"):
                if once.exists():
                    continue
                once.touch()
            for what in fault["do"].split(", "):
                self._act(what)

    def _act(self, what: str) -> None:
        if what == "raise":
            raise RuntimeError("a planned fault")
        if what == "raise another":  # equal faults are treated as one that comes back
            raise ArithmeticError("another planned fault")
        if what in self._actions:
            self._actions[what]()
        elif what.startswith("mark "):
            (self._marks / what[5:]).write_text(str(os.getpid()))
        elif what.startswith("await "):
            wait_until((self._marks / what[6:]).exists)
        elif what.startswith("kill "):
            wait_until((self._marks / what[5:]).read_text)
            os.kill(int((self._marks / what[5:]).read_text()), signal.SIGKILL)
        elif what == "known":
            wait_until(stop_is_known)
        elif what == "stay":
            time.sleep(1000)
        else:
            os.kill(os.getpid(), signal.Signals[what])

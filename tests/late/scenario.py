"""For scenarios on the device: the end of a script, and how a scenario forces an order.

with device.held() as gate, released_when_blocked("wait_for", gate):
    handle = checkpointer.save(...)       # is found waiting in `wait_for`, and only then goes on
assert gate.is_released()                 # else it did not wait
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from late import orderings

_NET_S = 25  # a hang ends the process
_SAMPLES = 20  # a thread that is in the same place so often in a row is blocked there
_INTERVAL_S = 0.001


def run(scenarios: dict[str, Any]) -> None:
    """Runs the scenario that the command line names; for the end of a script."""
    faulthandler.dump_traceback_later(_NET_S, exit=True)
    orderings.remove_asked()
    scenarios[sys.argv[1]]()
    print('{"event": "passed"}')


@contextlib.contextmanager
def when_blocked(function: str, *actions: Callable[[], object]) -> Iterator[None]:
    """Calls `actions`, in a thread, once a thread is blocked in this function of the product, or in
    torch or a lock called by it. Not at all if none ever is in the block.
    """
    over = threading.Event()

    def watch() -> None:
        before: list[tuple[int, int]] = []
        seen = 0
        while not over.wait(_INTERVAL_S):
            now = _places(function)
            seen = seen + 1 if now and now == before else 0
            before = now
            if seen == _SAMPLES:
                for action in actions:
                    action()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def released_when_blocked(function: str, *gates: Any) -> contextlib.AbstractContextManager[None]:
    """Releases gates of `device.held` then."""
    return when_blocked(function, *[gate.release for gate in gates])


def until_blocked(function: str) -> None:
    """Waits until a thread is blocked in this function."""
    blocked = threading.Event()
    with when_blocked(function, blocked.set):
        blocked.wait()


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(_INTERVAL_S)


def _places(function: str) -> list[tuple[int, int]]:
    """Where in the product's function threads are."""
    found = []
    for ident, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if frame.f_code.co_name == function and name.startswith("outlast."):
                found.append((ident, frame.f_lasti))
                break
            frame = frame.f_back
    return found

"""Saves, and is killed at a kill point: `python killed.py NUMBER [ASYNCHRONOUS]`.

The kill points are the system calls that raise audit events in Python, and the fsync calls.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from elastic.text_state import Text
from outlast.elastic import save_all_states
from outlast.elastic.states import storage

AUDITED = ("open", "os.", "fcntl.", "shutil.")
seen = 0
counting = False
point = int(sys.argv[1])
states = [Text("a", "new"), Text("b", "new")]


def count() -> None:
    global seen, counting
    if not counting:
        return
    if seen == point:
        counting = False
        os.kill(os.getpid(), signal.SIGKILL)
    seen += 1


def audit(event: str, args: Any) -> None:
    if event.startswith(AUDITED):
        count()


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        count()
        value = function(*args, **kwargs)
        count()
        return value

    return call


for name in ("fsync", "close", "fstat", "preadv", "write"):
    setattr(os, name, counted(getattr(os, name)))
fcntl.lockf = counted(fcntl.lockf)
sys.addaudithook(audit)
path = os.environ["OUTLAST_CHECKPOINT_PATH"]
os.environ["OUTLAST_CHECKPOINT_PATH"] = sys.argv[3]
save_all_states()  # imports all modules
os.environ["OUTLAST_CHECKPOINT_PATH"] = path
counting = True
handle: Any = save_all_states(bool(sys.argv[2]))
if sys.argv[2]:
    handle.wait()
Path(f"{sys.argv[3]}.told").touch()
storage.release()  # more points, after the save has returned
counting = False

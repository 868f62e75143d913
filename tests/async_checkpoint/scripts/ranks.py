"""Shared by the rank scripts of this package: they print JSON lines and run a named scenario.

@scenario
def one_fails(...) -> None: ...

main()                             # python script.py one_fails ARGUMENT...
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outlast.errors import OutlastError

# The test helpers; a persistent worker gets the path too.
sys.path.append(str(Path(__file__).parents[2]))

SCENARIOS: dict[str, Callable[..., None]] = {}
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


def say(event: str, **fields: Any) -> None:
    """One line, in one write."""
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def raising(function: Callable[[], Any]) -> Any:
    """Calls a function that may raise, and prints the outcome."""
    try:
        value = function()
    except (OutlastError, ValueError, TypeError, MemoryError) as error:
        say("raised", type=type(error).__name__, message=str(error))
        return None
    say("returned", value=value)
    return value


def join_group(store: str = "") -> None:
    """Creates the process group, on its usual TCP store or on a file store."""
    if store:
        options: dict[str, Any] = {"rank": RANK, "world_size": WORLD_SIZE}
        file: Any = dist.FileStore(store, WORLD_SIZE)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=file, **options)
    else:
        dist.init_process_group("gloo")


def meet() -> int:
    """Waits for all ranks; returns their number.

    Waits for gloo's thread to drop the tensor too, which needs the GIL. If it came while the
    interpreter is ending, the process would abort ("terminate called without an active exception"):
    a group is not over with `destroy_process_group` if something, such as a mesh, still has it.
    """
    count = torch.ones(1)
    dist.all_reduce(count)
    while count._use_count() > 1:  # type: ignore[attr-defined]
        time.sleep(0.001)  # no event says so
    return int(count)


def leave_group() -> None:
    """Ends the process group, once all ranks are here."""
    meet()
    dist.destroy_process_group()


def scenario(function: Callable[..., None]) -> Callable[..., None]:
    """Registers a function as a scenario for the command line."""
    SCENARIOS[function.__name__] = function
    return function


def main() -> None:
    """Runs the scenario that the command line names."""
    SCENARIOS[sys.argv[1]](*sys.argv[2:])

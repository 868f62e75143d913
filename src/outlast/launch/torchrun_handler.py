"""What torchrun's registry of rendezvous asks the entry point for (`torchrun.handlers`).

torch loads it with `torch.distributed.checkpoint`, in each process of a training. So the rendezvous
and its client of etcd are imported when torchrun makes one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def handler() -> Callable[[Any], Any]:
    """A function that makes the rendezvous of given `RendezvousParameters`."""
    return lambda parameters: importlib.import_module("outlast.launch.hosts.etcd.torchrun").create(
        parameters
    )

"""The backends of process groups on a device: what a fault of a rank needs of them.

torch has one interface for all, and says nothing of how long a call may block. What is used here
was read in the source of each backend: see "Backends" in `docs/gpu.md`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

log = logging.getLogger("outlast.devices")


_NCCL = ("nccl", "nccl2", "nccl-lazy")
"""`nccl` is `ProcessGroupNCCL` up to torch 2.14, and nccl2 since 2.15. Their abort waits for the
device, for no longer than the timeout of the group.
"""


class Backend:
    """The backend of one process group. One that is not known is named in the log: its abort may do
    nothing, or not return, so a rank does not wait for it for long.
    """

    abort_s = 10.0
    """After which its abort is taken for one that does not end, in seconds."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        named = getattr(backend, "_get_backend_name", lambda: type(backend).__name__)
        self.name = str(named())
        if self.name in _NCCL:
            self.abort_s = 30.0
        else:
            _say_unknown(self.name)

    def abort(self) -> None:
        """Ends all collectives. Called in a thread of its own, as it may not return; never in two
        threads at once. A communicator that is still being made is not ended.
        """
        self._backend.abort()

    def begun(self) -> int:
        """How many collectives have begun; a `RuntimeError` if the backend does not count them."""
        return int(self._backend._get_sequence_number_for_group())


@functools.cache
def _say_unknown(name: str) -> None:
    text = (
        "the backend %s is not one that outlast knows: a rank whose abort of it does not end "
        "within %g s leaves for its replacement"
    )
    log.info(text, name, Backend.abort_s)

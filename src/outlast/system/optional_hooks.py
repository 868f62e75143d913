"""What not every type of device has: streams beside the default one, events, generators, ...

torch lets a backend leave these out: its base classes raise then, at each call. So the first use in
a process tries, and the log says once what a type lacks, and what follows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("outlast.devices")

_LACKS = ("doesn't support", "not support", "not implemented")
"""In the text of torch's error; it is a plain `RuntimeError` for most hooks."""

_known: dict[tuple[str, str], bool] = {}


def has(type: str, hook: str, probe: Callable[[], object], otherwise: str) -> bool:
    """Whether the devices of a type have `hook`, which `probe` uses: it is called once.
    `otherwise` says in the log what follows if they do not. Errors of a device are raised.
    """
    if (type, hook) not in _known:
        try:
            probe()
            _known[type, hook] = True
        except (AttributeError, RuntimeError) as e:
            if not _is_lack(e):
                raise
            _known[type, hook] = False
            log.warning("the device type %s has no %s: %s", type, hook, otherwise)
    return _known[type, hook]


def _is_lack(error: Exception) -> bool:
    if isinstance(error, AttributeError | NotImplementedError):
        return True
    is_of_device = type(error).__name__ == "AcceleratorError"  # from torch 2.8 on
    return not is_of_device and any(text in str(error).lower() for text in _LACKS)

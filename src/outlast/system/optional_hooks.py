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
            is_of_device = e.__class__.__name__ == "AcceleratorError"  # from torch 2.8 on
            says_so = not is_of_device and any(text in str(e).lower() for text in _LACKS)
            if not says_so and not isinstance(e, AttributeError | NotImplementedError):
                raise
            _known[type, hook] = False
            log.warning("the device type %s has no %s: %s", type, hook, otherwise)
    return _known[type, hook]

"""Copies memory, bypassing the caches: for large data that is not read again soon.

It is a few lines of C (`nontemporal_copy.c`), compiled when the package is installed. Where there
was no compiler, or the processor is not an x86-64, the C library's `memmove` is used: the same
result in 1.5 times the time.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

LIBRARY = "_nontemporal_copy.so"
"""The name of the compiled file, beside this one."""

log = logging.getLogger("outlast.checkpoint")

Move = Callable[[int, int, int], object]


def load(library: Path) -> tuple[Move, bool]:
    """The copy function, and whether it is that of the compiled file, which may be missing."""
    # A call through CDLL releases the GIL.
    function, own = ctypes.CDLL(None).memmove, False
    if library.exists():
        try:
            function, own = ctypes.CDLL(str(library)).outlast_nontemporal_copy, True
        except (OSError, AttributeError) as e:  # built for another machine or version
            log.warning("%s cannot be used, and copies are slower: %s", library, e)
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function, own


move, streams = load(Path(__file__).with_name(LIBRARY))
"""`move(to, source, size_bytes)` copies between two addresses that do not overlap; `streams` says
whether it bypasses the caches."""

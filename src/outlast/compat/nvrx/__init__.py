"""Stands in for nvidia-resiliency-ext 0.4: names and signatures of its restart in place.

    import outlast.compat.nvrx.inprocess as inprocess   # was: nvidia_resiliency_ext.inprocess

`docs/migration-nvrx.md` lists what is the same, what is better and what is missing. A program whose
imports cannot be changed calls `install()` before them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

__all__ = ["install"]

_REPLACED = "nvidia_resiliency_ext"


def install() -> None:
    """Makes `import nvidia_resiliency_ext...` find the modules of this package, in this process.

    Raises:
        RuntimeError: if the real package was imported before.
    """
    this = sys.modules[__name__]
    if sys.modules.get(_REPLACED, this) is not this:
        raise RuntimeError(f"{_REPLACED} is imported already: call install() before")
    sys.modules[_REPLACED] = this
    for found in pkgutil.walk_packages(this.__path__, f"{__name__}."):
        module = importlib.import_module(found.name)
        sys.modules[found.name.replace(__name__, _REPLACED, 1)] = module

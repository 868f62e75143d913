"""Packages whose modules are imported when something of them is asked for (PEP 562).

The small processes that `outlast` starts beside a training import modules of such packages, and
have no use for torch, whose import takes seconds.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["exports"]


def exports(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package.

    Args:
        package: its name.
        modules: for each name that it exports, the module of it that has it.
    """
    namespace = vars(sys.modules[package])

    def getattr_(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        namespace[name] = value  # asked for once
        return value

    return getattr_, lambda: sorted({*namespace, *modules})

"""Packages that import each of their modules on the first use of a name in it (PEP 562).

Background processes import modules of them, without torch, whose import takes seconds.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def exports(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package, which gets an `__all__`; `modules` has, for
    each module of it, the names in it that the package exports; a module is exported under its own
    name.
    """
    namespace = vars(sys.modules[package])
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def getattr_(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{module_of[name]}")
        return module if name == module_of[name] else getattr(module, name)

    # Where type checkers do not see it: to mypy, one that is not written out has no names.
    namespace["__all__"] = sorted(module_of)
    return getattr_, lambda: sorted({*namespace, *module_of})

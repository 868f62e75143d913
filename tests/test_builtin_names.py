"""No public name hides a built-in one, unless it stands for it."""

from __future__ import annotations

import builtins
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import outlast

BUILTINS = {name for name in dir(builtins) if not name.startswith("_")}


def public_objects() -> Iterator[tuple[str, str, object]]:
    """Module, name and value of everything that a public module exports."""
    names = [each.name for each in pkgutil.iter_modules(outlast.__path__, "outlast.")]
    names += [
        each.name for each in pkgutil.iter_modules(outlast.inprocess.__path__, "outlast.inprocess.")
    ]
    for name in ["outlast", *names]:
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", ()):
            yield name, exported, getattr(module, exported)


def test_no_public_name_hides_a_builtin() -> None:
    hiding = set()
    for module, name, value in public_objects():
        builtin = getattr(builtins, name, None)
        if name in BUILTINS and not (inspect.isclass(value) and issubclass(value, builtin)):  # type: ignore[arg-type]
            hiding.add(f"{module}.{name}")
        if inspect.isclass(value) and value.__module__.startswith("outlast."):
            hiding |= {f"{module}.{name}.{each}" for each in vars(value) if each in BUILTINS}
    assert hiding == set()


def test_a_timeout_is_the_builtin_one_too() -> None:
    assert issubclass(outlast.errors.RankTimeout, TimeoutError)
    assert issubclass(outlast.errors.CheckpointTimeout, TimeoutError)
    assert not issubclass(outlast.errors.CheckpointTimeout, outlast.errors.RestartError)

"""The reference documents what the packages export, and nothing else."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import outlast

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
PACKAGES = ("inprocess", "async_checkpoint", "elastic", "errors", "events", "chaos")
_ENTRY = re.compile(r"^::: (\S+)$(?:\n    options:\n((?:      .*\n)+))?", re.M)


def resolve(path: str) -> Any:
    """A module, or what stands in one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def documented(package: str) -> Iterator[str]:
    """The names in the section of a package: those of objects, and of modules that it exports."""
    whole = importlib.import_module(f"outlast.{package}")
    section = re.split(r"^## ", REFERENCE.read_text(), flags=re.M)
    (text,) = (each for each in section if each.startswith(f"outlast.{package}\n"))
    for path, options in _ENTRY.findall(text):
        found = resolve(path)
        name = path.rpartition(".")[2]
        if not isinstance(found, ModuleType) or name in whole.__all__:
            yield name
        elif members := re.search(r"members: \[(.*)\]", options):
            yield from members[1].split(", ")
        else:
            yield from found.__all__


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_is_documented(package: str) -> None:
    whole = importlib.import_module(f"outlast.{package}")
    exported = {name: getattr(whole, name) for name in whole.__all__}
    modules = {"outlast.errors"}  # whose names are documented there
    modules |= {value.__name__ for value in exported.values() if isinstance(value, ModuleType)}
    names = list(documented(package))
    assert sorted(names) == sorted(set(names)), "documented twice"
    elsewhere = {n for n, v in exported.items() if getattr(v, "__module__", "") in modules}
    assert exported.keys() - elsewhere <= set(names) <= exported.keys()


def test_the_names_of_the_top_level_are_those_of_the_packages() -> None:
    exported = {name: getattr(outlast, name) for name in outlast.__all__}
    modules = {name for name, value in exported.items() if isinstance(value, ModuleType)}
    assert modules == set(PACKAGES)
    for name in exported.keys() - modules:
        assert any(getattr(exported[each], name, None) is exported[name] for each in PACKAGES), name

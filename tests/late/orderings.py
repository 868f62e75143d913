"""The calls of the product that order what devices and the host do, and how one is removed.

    for ordering in orderings():      # found in the source, by `ast`
        ...
    remove(str(ordering))         # in this process, the product runs without that call

Found are torch's own (`wait_event`, `synchronize`, `on_stream`, ...), in every module that refers
to torch, and the calls of functions of the package, and of methods of the same folder, that do
nothing else.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import os
from collections.abc import Iterator, Set
from pathlib import Path
from types import CodeType
from typing import Any

import outlast

REMOVED = "LATE_REMOVED"
"""In the environment of a scenario: the ordering that it runs without."""

_PACKAGE = Path(outlast.__file__).parent
_METHODS = {"wait_event", "wait_stream", "record_event", "record", "record_stream", "synchronize"}
_METHODS |= {"set_stream", "set_device_index"}
_QUERIES = {"query"}  # of a stream or an event: what follows depends on it
_CONTEXTS = {"on_stream", "device", "stream"}  # of a stream or of a device


@dataclasses.dataclass(frozen=True)
class Ordering:
    """A call in `function` of `file`; `number` counts those of the function with the same text."""

    file: str
    function: str
    text: str
    number: int = 0

    def __str__(self) -> str:
        which = f" ({self.number + 1})" if self.number else ""
        return f"{self.file}: {self.function}: {self.text}{which}"


def orderings() -> list[Ordering]:
    """All of them, in the order of the files."""
    return [each for file in sorted(_trees()) for each, _ in _in(file)]


def remove(ordering: str) -> None:
    """Removes one from the functions of this process: its statement, its `with`, or its condition.

    Raises:
        ValueError: if there is none of this name.
    """
    file = ordering.partition(": ")[0]
    found = [(each, node) for each, node in _in(file) if str(each) == ordering]
    if not found:
        raise ValueError(f"the package has no {ordering!r}")
    each, node = found[0]
    path = _PACKAGE / file
    tree = _Without(node).visit(ast.parse(path.read_text()))
    code = compile(ast.fix_missing_locations(tree), str(path), "exec")
    live: Any = importlib.import_module(
        ".".join(("outlast", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
    )
    for name in each.function.split("."):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
        live = inspect.getattr_static(live, name)
    live = getattr(live, "fget", None) or getattr(live, "__func__", live)
    inspect.unwrap(live).__code__ = code


def remove_asked() -> None:
    """Removes the one that the environment names."""
    if REMOVED in os.environ:
        remove(os.environ[REMOVED])


@functools.cache
def _trees() -> dict[str, ast.Module]:
    sources = {path: path.read_text() for path in _PACKAGE.rglob("*.py")}
    return {
        str(path.relative_to(_PACKAGE)): ast.parse(source)
        for path, source in sources.items()
        if "torch" in source
    }


@functools.cache
def _wrappers() -> frozenset[tuple[str, str]]:
    """The functions of the package that only order devices: the folder, empty for those that are
    not methods, and the name.
    """
    found: set[tuple[str, str]] = set()
    while True:
        before = len(found)
        for file, tree in _trees().items():
            folder = str(Path(file).parent)
            for owner in ast.walk(tree):
                for each in ast.iter_child_nodes(owner):
                    if isinstance(each, ast.FunctionDef) and _only_orders(each, folder, found):
                        found.add((folder if isinstance(owner, ast.ClassDef) else "", each.name))
        if len(found) == before:
            return frozenset(found)


def _only_orders(
    body: ast.FunctionDef | ast.For | ast.If | ast.With, folder: str, known: Set[tuple[str, str]]
) -> bool:
    """Whether all that it does is to order, besides conditions, loops and imports."""
    plain = (ast.Import, ast.ImportFrom, ast.Assign)
    does = [
        each
        for each in body.body
        if not isinstance(each, plain)
        and not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]
    return bool(does) and all(
        (isinstance(each, ast.For | ast.If | ast.With) and _only_orders(each, folder, known))
        or (
            isinstance(each, ast.Expr)
            and isinstance(each.value, ast.Call)
            and _orders(each.value, folder, known)
        )
        for each in does
    )


def _orders(call: ast.Call, folder: str, wrappers: Set[tuple[str, str]]) -> bool:
    if isinstance(call.func, ast.Name):
        return ("", call.func.id) in wrappers
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    return name in _METHODS or (folder, name) in wrappers


def _in(file: str) -> Iterator[tuple[Ordering, ast.AST]]:
    """The orderings in one file, with what is to be removed."""
    seen: dict[tuple[str, str], int] = {}
    for function, node in _places(_trees()[file], (), str(Path(file).parent)):
        key = (function, ast.unparse(node))
        number = seen[key] = seen.get(key, -1) + 1
        yield Ordering(file, *key, number), node


def _places(tree: ast.AST, inside: tuple[str, ...], folder: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if _is_ordering(node, folder):
            yield ".".join(inside), node
        deeper = inside
        if isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.FunctionDef) and not isinstance(tree, ast.FunctionDef)
        ):
            deeper = (*inside, node.name)
        yield from _places(node, deeper, folder)


def _is_ordering(node: ast.AST, folder: str) -> bool:
    if isinstance(node, ast.Call):
        is_query = isinstance(node.func, ast.Attribute) and node.func.attr in _QUERIES
        return is_query or _orders(node, folder, _wrappers())
    if not isinstance(node, ast.withitem) or not isinstance(node.context_expr, ast.Call):
        return False
    called = node.context_expr.func
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
    return name in _CONTEXTS


class _Without(ast.NodeTransformer):
    """Removes the node at the place of `node`; a value becomes true."""

    def __init__(self, node: ast.AST) -> None:
        self._text = ast.unparse(node)
        expression = node.context_expr if isinstance(node, ast.withitem) else node
        self._at = (expression.lineno, expression.col_offset)  # type: ignore[attr-defined]

    def _is(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.expr) or (node.lineno, node.col_offset) != self._at:
            return False
        return ast.unparse(node) == self._text

    def visit_Expr(self, node: ast.Expr) -> Any:
        if self._is(node.value):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> Any:
        node.items = [item for item in node.items if not self._is(item.context_expr)]
        self.generic_visit(node)
        return node if node.items else node.body

    def visit_Call(self, node: ast.Call) -> Any:
        if self._is(node):
            return ast.copy_location(ast.Constant(True), node)
        return self.generic_visit(node)

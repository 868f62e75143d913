"""What a script imports before anything else: found in its source, without running it.

    import os
    os.environ["TOKENIZERS_PARALLELISM"] = "false"   # a constant: repeated in the same order
    import torch
    from utils import setup
    setup()                                          # may change what later imports do: the end
    import model

A standby process imports ahead of time what the script will import, and the script must not be able
to tell the difference. So the list ends at the first statement that could influence a later import:
a call of an unknown function, a change of `sys.path`, a condition. Definitions, constants and
calls such as `logging.getLogger` cannot.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable

_HARMLESS_CALLS = (
    "bool", "dict", "float", "frozenset", "int", "len", "list", "print", "range", "set",
    "sorted", "str", "tuple",
    "argparse", "collections", "dataclasses", "enum", "functools", "logging", "math", "pathlib",
    "re", "time", "typing", "warnings",
    "Path", "TypeVar", "getLogger", "namedtuple", "os.environ.get", "os.getenv", "os.path",
)  # fmt: skip
_FRAMEWORKS = (
    "accelerate", "datasets", "deepspeed", "lightning", "pytorch_lightning", "torchmetrics",
    "torchtitan", "torchvision", "transformers",
)  # fmt: skip
"""Packages whose import takes seconds, and does not depend on what a script has done before, except
for what `framework_imports` looks at.
"""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)


@dataclasses.dataclass(frozen=True)
class Import:
    """One import: the arguments of `__import__`. `optional`: the script handles its failure."""

    name: str
    names: tuple[str, ...] = ()
    level: int = 0
    optional: bool = False

    def __str__(self) -> str:
        whole = "." * self.level + self.name
        return f"from {whole} import {', '.join(self.names)}" if self.names else f"import {whole}"


@dataclasses.dataclass(frozen=True)
class SetVariable:
    """`os.environ[name] = value`, or `os.environ.setdefault(name, value)`."""

    name: str
    value: str
    default: bool = False


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What a script does first."""

    steps: tuple[Import | SetVariable, ...]  # in the order of the script
    # the line of the first statement that may influence a later import; 0 if no import follows any
    # such statement
    ends_at: int
    changes_environment: bool  # whether the rest of the script assigns environment variables


def beginning(source: str | bytes) -> Beginning:
    """Find the imports at the beginning of a script."""
    module = ast.parse(source)
    steps: list[Import | SetVariable] = []
    for index, statement in enumerate(module.body):
        if _is_main_guard(statement):
            break
        found = _steps(statement)
        if found is None:
            rest = module.body[index:]
            imports = any(isinstance(s, ast.Import | ast.ImportFrom) for s in rest)
            line = statement.lineno if imports else 0
            return Beginning(tuple(steps), line, _changes_environment(rest))
        steps += found
    return Beginning(tuple(steps), 0, _changes_environment(module.body))


def framework_imports(source: str | bytes, known: Iterable[Import | SetVariable]) -> list[Import]:
    """The imports of frameworks behind the beginning of a script, in its functions too; without
    those that are `known`. None if the script may change what they import or do: if it assigns
    environment variables or attributes of modules, or mentions `sys.path` or `sys.modules`.
    """
    module = ast.parse(source)
    found: list[Import] = []
    modules: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            modules.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
            found += [Import(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.update(alias.asname or alias.name for alias in node.names)
            found.append(Import(node.module or "", tuple(alias.name for alias in node.names)))
    if _changes_environment(module.body):
        return []
    for node in ast.walk(module):
        name = _dotted(node) if isinstance(node, ast.Attribute) else ""
        assigned = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if name in ("sys.path", "sys.modules") or (assigned and name.split(".")[0] in modules):
            return []
    before = set(known)
    return [
        dataclasses.replace(step, optional=True)
        for step in dict.fromkeys(found)
        if step.name.partition(".")[0] in _FRAMEWORKS and step not in before
    ]


def _steps(statement: ast.stmt) -> list[Import | SetVariable] | None:
    if isinstance(statement, ast.Import):
        return [Import(alias.name) for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        if statement.module == "__future__":
            return []
        names = tuple(alias.name for alias in statement.names)
        return [Import(statement.module or "", names, statement.level)]
    if isinstance(statement, _DEFINITIONS) or _is_type_checking(statement):
        return []
    if isinstance(statement, ast.Try) and not statement.finalbody:
        return _steps_of_try(statement)
    variable = _set_variable(statement)
    if variable is not None:
        return [variable]
    return [] if _harmless(statement) else None


def _steps_of_try(statement: ast.Try) -> list[Import | SetVariable] | None:
    handled = [s for handler in statement.handlers for s in handler.body]
    others = [_steps(s) for s in (*handled, *statement.orelse)]
    body = [_steps(s) for s in statement.body]
    if any(found is None for found in (*others, *body)):
        return None
    steps = [step for found in body for step in found or ()]
    return [dataclasses.replace(s, optional=True) if isinstance(s, Import) else s for s in steps]


def _set_variable(statement: ast.stmt) -> SetVariable | None:
    match statement:
        case ast.Assign(
            targets=[ast.Subscript(value=target, slice=ast.Constant(value=str(name)))],
            value=ast.Constant(value=str(value)),
        ) if _dotted(target) in ("os.environ", "environ"):
            return SetVariable(name, value)
        case ast.Expr(
            value=ast.Call(
                func=function,
                args=[ast.Constant(value=str(name)), ast.Constant(value=str(value))],
                keywords=[],
            )
        ) if _dotted(function) in ("os.environ.setdefault", "environ.setdefault"):
            return SetVariable(name, value, default=True)
    return None


def _harmless(statement: ast.stmt) -> bool:
    """Whether a statement changes nothing but variables of the script."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Expr):
        targets = []
    else:
        return False
    names = (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.expr_context)
    if not all(isinstance(node, names) for target in targets for node in ast.walk(target)):
        return False
    calls = (_dotted(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call))
    return all(
        any(f"{name}.".startswith(f"{known}.") for known in _HARMLESS_CALLS) for name in calls
    )


def _dotted(node: ast.expr) -> str:
    """`os.environ.get` for that expression, and `Path.parent` for `Path(...).parent`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    return "str" if isinstance(node, ast.Constant | ast.JoinedStr) else "?"


def _is_main_guard(statement: ast.stmt) -> bool:
    match statement:
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
    return False


def _is_type_checking(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and _dotted(statement.test).rpartition(".")[2] == "TYPE_CHECKING"
    )


def _changes_environment(statements: Iterable[ast.stmt]) -> bool:
    """Whether the code, functions included, writes to `os.environ` other than `_set_variable`."""
    for statement in statements:
        if _set_variable(statement) is not None:
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                target = _dotted(node.value)
            elif isinstance(node, ast.Call):
                target, _, method = _dotted(node.func).rpartition(".")
                if method in ("putenv", "unsetenv"):
                    return True
                if method not in ("setdefault", "update", "pop", "clear"):
                    continue
            else:
                continue
            if target in ("os.environ", "environ"):
                return True
    return False

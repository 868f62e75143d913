"""Names in the docstrings and comments of the source: files, and attributes of classes and modules,
in backticks, have to exist. `python tests/docs/check_names.py` prints those that do not.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "outlast"
_QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w./]*)(?:\([^`]*\))?`(?!`)")
_OTHERS = sys.stdlib_module_names | {"torch", "dist", "deepspeed", "torchrun"}


class Names:
    """What the source defines: files, the attributes of classes by the name of the class, and those
    of modules by the last part of the name of the module."""

    def __init__(self) -> None:
        folders = (SOURCE, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples")
        self.files = [f"/{path}" for folder in folders for path in folder.rglob("*.*")]
        self.classes: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)
        self.modules: dict[str, set[str]] = defaultdict(set)
        for path in SOURCE.rglob("*.py"):
            name = path.parent.name if path.name == "__init__.py" else path.stem
            self._read(ast.parse(path.read_text()), self.modules[name])
        for package in SOURCE.rglob("__init__.py"):
            parts = (p.stem for p in package.parent.iterdir() if p.suffix == ".py" or p.is_dir())
            self.modules[package.parent.name].update(parts)

    def _read(self, tree: ast.Module, module: set[str]) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._read_class(node)
        for node in tree.body:
            module.update(_defined(node))

    def _read_class(self, node: ast.ClassDef) -> None:
        found = self.classes[node.name]
        bases = (ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
        self.bases[node.name].update(bases)
        for each in node.body:
            found.update(_defined(each))
        for each in ast.walk(node):
            is_set = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
            if is_set and ast.unparse(each.value) == "self":
                found.add(each.attr)

    def has(self, kind: str, attribute: str) -> bool:
        """Whether the class, or one of its bases, has it; true if a base is not of this source."""
        bases = self.bases[kind]
        return attribute in self.classes[kind] or any(
            base not in self.classes or self.has(base, attribute) for base in bases
        )

    def wrong(self, name: str) -> bool:
        if name.endswith((".py", ".jinja")):
            return not any(each.endswith(f"/{name}") for each in self.files)
        first, *rest = name.split(".")
        if not rest or first in _OTHERS or "/" in name:
            return False
        if first in self.classes:
            return not self.has(first, rest[0])
        if first not in self.modules or rest[0] in self.modules[first]:
            return len(rest) > 1 and first in self.modules and self.wrong(".".join(rest))
        # Perhaps a variable that has the name of a module: a state, a record, a job.
        return not any(rest[0] in attributes for attributes in self.classes.values())


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from ((each.asname or each.name).split(".")[0] for each in node.names)
    elif isinstance(node, ast.If | ast.Try | ast.With):
        for each in ast.iter_child_nodes(node):
            yield from _defined(each)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    content = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        is_text = token.type == tokenize.STRING and token.string.startswith('"""')
        if is_text or token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def main() -> None:
    names, found = Names(), []
    for path in sorted(SOURCE.rglob("*.py")):
        if SOURCE / "compat" in path.parents:
            continue  # they are of another package
        for line, text in texts(path):
            for match in _QUOTED.finditer(text):
                if names.wrong(match[1]):
                    at = line + text[: match.start()].count("\n")
                    found.append(f"{path.relative_to(ROOT)}:{at}: `{match[1]}`")
    print("\n".join(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

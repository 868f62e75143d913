"""Type-checks the Python examples of the README and of docs: `make check` runs it.

    python tests/docs/check_examples.py [FOLDER]

Each ```python block becomes a module in FOLDER (build/examples), named by its title, or else by its
page and line. A name that a block uses without defining it is imported from names.py, if it is
there; mypy reports all others.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = Path(__file__).with_name("names.py")
BLOCK = re.compile(r'^```python(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
OPTIONS = [
    "--config-file=",
    "--check-untyped-defs",
    "--warn-unused-ignores",
    "--no-strict-optional",  # `call: CallWrapper | None = None` is never None inside the function
    "--disable-error-code=no-redef",  # "before" and "now" in one block
    "--disable-error-code=var-annotated",  # an example annotates what helps its reader
    "--disable-error-code=has-type",
]
# What the migration pages import "before"; not installed here.
BEFORE = ["adaptdl/checkpoint", "adaptdl/env", "nvidia_resiliency_ext/inprocess"]


def defined(tree: ast.AST) -> set[str]:
    """The names that a module binds anywhere."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def module(source: str, known: set[str]) -> str:
    """An example as a module: the import on the first line replaces the fence line."""
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    missing = sorted((used - defined(tree)) & known)
    return (f"from names import {', '.join(missing)}" if missing else "") + "\n" + source


def main(folder: Path) -> int:
    """Writes the modules and checks them: mypy's exit code."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(NAMES, folder)
    for name in BEFORE:
        stub = folder / f"{name}.pyi"
        stub.parent.mkdir(exist_ok=True)
        (stub.parent / "__init__.pyi").touch()
        stub.touch()
    known = defined(ast.parse(NAMES.read_text()))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        for title, source in ((found[1], found[2]) for found in BLOCK.finditer(text)):
            line = text[: text.index(source)].count("\n")
            name = title or f"{page.stem}_line{line}.py".replace("-", "_")
            path = folder / name
            assert not path.exists(), f"{page}: there are two examples {name}"
            # The README's examples are checked as a user's strict settings check them.
            strict = "\n# mypy: strict-optional\n" if page.stem == "README" else ""
            path.write_text(module(source, known) + strict)
    command = [sys.executable, "-m", "mypy", *OPTIONS, "--cache-dir", ROOT / ".mypy_cache/examples"]
    return subprocess.run([*command, "."], cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "examples"))

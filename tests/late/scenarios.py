"""The scenarios: the functions of the scripts, by script."""

from __future__ import annotations

import ast
from pathlib import Path

_SCRIPTS = Path(__file__).parent / "scripts"


def scenarios() -> list[tuple[str, str]]:
    """Script and function of each: those without arguments, except helpers that begin with `_`."""
    found = []
    for script in ("snapshots", "checks", "faults", "contexts", "without"):
        for each in ast.parse((_SCRIPTS / f"{script}.py").read_text()).body:
            if isinstance(each, ast.FunctionDef) and not each.args.args and not each.args.vararg:
                found.append((script, each.name))
    return found

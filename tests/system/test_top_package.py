"""`import outlast` is cheap, configures nothing, and offers its packages and their main names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import outlast

IMPORT = """
import logging, signal, sys
handlers = [signal.getsignal(s) for s in signal.valid_signals()]
import outlast
assert not {"torch", "outlast.inprocess", "outlast.elastic"} & set(sys.modules)
assert [signal.getsignal(s) for s in signal.valid_signals()] == handlers
assert not logging.getLogger().handlers
assert {"inprocess", "Wrapper", "Job", "__version__"} <= set(dir(outlast))
assert outlast.inprocess is sys.modules["outlast.inprocess"]
assert outlast.Wrapper is outlast.inprocess.Wrapper
assert outlast.CallWrapper is outlast.inprocess.CallWrapper
for name in outlast.__all__:
    assert getattr(outlast, name) is not None, name
assert not hasattr(outlast, "nothing")
"""


@pytest.mark.slow
def test_the_packages_are_there_after_the_import_of_outlast() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_job_without_numpy_is_refused_when_it_is_imported() -> None:
    """Not in each iteration of a job, by "Numpy is not available" from torch."""
    program = "import sys; sys.modules['numpy'] = None; import outlast; outlast.Job"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "ModuleNotFoundError: import of numpy" in done.stderr


def test_what_a_test_replaces_in_a_package_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as replaced:
        replaced.setattr("outlast.elastic.Job", None)
        assert outlast.Job is None
    assert outlast.Job is outlast.elastic.Job is not None


def test_type_checkers_see_what_a_star_import_gives() -> None:
    """To mypy, an `__all__` that is assigned, and not as a list of texts, has no names at all."""
    for path in Path(outlast.__file__).parent.rglob("*.py"):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.Assign) and "__all__" in map(ast.unparse, _names(each)):
                assert isinstance(each.targets[0], ast.Name), path
                assert all(isinstance(name, str) for name in ast.literal_eval(each.value)), path


def _names(assigned: ast.Assign) -> list[ast.Name]:
    return [n for target in assigned.targets for n in ast.walk(target) if isinstance(n, ast.Name)]

"""The imports that a standby process may do ahead of time, found in the source of a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.launch.workers.script_imports import (
    SetVariable,
    beginning,
    framework_imports,
)

REPOSITORY = Path(__file__).parents[3]


def steps(source: str) -> list[str]:
    return [str(step) for step in beginning(source).steps]


def test_imports_in_the_order_of_the_script() -> None:
    source = '''
"""A docstring."""
from __future__ import annotations
import os, json as j
import logging
import torch.nn as nn
from a.b import c, d as e
LOG = logging.getLogger(__name__)
RANK, SIZE = int(os.environ["RANK"]), int(os.environ.get("SIZE", 1))
class Model(nn.Module):
    import hidden
def main():
    import also_hidden
from late import f
if __name__ == "__main__":
    import not_for_a_standby
    main()
'''
    expected = ["import os", "import json", "import logging", "import torch.nn"]
    assert steps(source) == [*expected, "from a.b import c, d", "from late import f"]
    assert beginning(source).ends_at == 0


@pytest.mark.parametrize(
    "statement",
    [
        "setup()",
        "sys.path.insert(0, 'lib')",
        "os.environ['A'] = str(1)",
        "os.environ.update(A='1')",
        "torch.set_default_dtype(torch.float64)",
        "torch.backends.cudnn.benchmark = True",
        "x = configure()",
        "if sys.argv[1:]:\n    import b",
        "with lock:\n    import b",
        "for name in names:\n    use(name)",
        "del os.environ['A']",
    ],
)
def test_a_statement_that_may_influence_imports_ends_the_list(statement: str) -> None:
    found = beginning(f"import a\n{statement}\nimport c\n")
    assert [str(step) for step in found.steps] == ["import a"]
    assert found.ends_at == 2


def test_no_line_is_named_if_no_import_follows() -> None:
    assert beginning("import a\nsetup()\n").ends_at == 0


def test_constant_variables_are_part_of_the_order() -> None:
    source = "import os\nos.environ['A'] = '1'\nos.environ.setdefault('B', '2')\nimport c"
    found = beginning(source)
    assert found.steps[1:3] == (SetVariable("A", "1"), SetVariable("B", "2", default=True))
    assert not found.changes_environment


@pytest.mark.parametrize(
    "statement",
    ["os.environ['A'] = f()", "environ.pop('A')", "os.putenv('A', '1')", "del os.environ['A']"],
)
def test_a_later_change_of_the_environment_is_noticed(statement: str) -> None:
    assert beginning(f"import os\ndef main():\n    {statement}\n").changes_environment
    assert not beginning("import os\ndef main():\n    print(os.environ['A'])").changes_environment


def test_an_import_whose_failure_the_script_handles_is_optional() -> None:
    source = "try:\n    import a\nexcept ImportError:\n    a = None\nimport b"
    found = beginning(source)
    assert [getattr(step, "optional", None) for step in found.steps] == [True, False]


def test_the_examples_can_be_imported_ahead_whole() -> None:
    for path in (REPOSITORY / "examples").rglob("*.py"):
        found = beginning(path.read_bytes())
        assert found.ends_at == 0, path


def test_a_script_that_cannot_be_parsed() -> None:
    with pytest.raises(SyntaxError):
        beginning("import a\nthis is no Python")


FRAMEWORK = """
import os
setup()
import lightning.pytorch as pl
import numpy
def main():
    from transformers import Trainer
    import helpers
"""


def test_frameworks_are_found_everywhere_in_a_script() -> None:
    found = framework_imports(FRAMEWORK, beginning(FRAMEWORK).steps)
    assert [str(step) for step in found] == [
        "import lightning.pytorch",
        "from transformers import Trainer",
    ]
    assert all(step.optional for step in found)
    known = "import lightning\nimport lightning"
    assert framework_imports(known, beginning(known).steps) == []


@pytest.mark.parametrize(
    "statement",
    [
        *("os.environ['HF_HOME'] = f()", "sys.path.insert(0, 'mine')", "numpy.float = float"),
        "sys.modules['lightning'] = numpy",
    ],
)
def test_no_framework_of_a_script_that_may_change_its_import(statement: str) -> None:
    assert framework_imports(f"{FRAMEWORK}    {statement}\n", ()) == []

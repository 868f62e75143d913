"""The examples of background calls run as the page has them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
SECTION = GUIDE.read_text().partition("\n## Background calls\n")[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def test_the_page_has_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(example: str, tmp_path: Path) -> None:
    program = tmp_path / "example.py"
    program.write_text(example)
    command = [sys.executable, "-W", "error", program]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "never\n" not in result.stdout

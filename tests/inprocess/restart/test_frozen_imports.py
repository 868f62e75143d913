"""A collection of garbage does not pass over what the imports have made, for each restart and at
the end of the process; reference cycles that the function makes are still collected.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc, json, weakref
from outlast import inprocess

class Cycle:
    def __init__(self):
        self.itself = self

@inprocess.Wrapper()
def main():
    made = weakref.ref(Cycle())
    gc.collect()
    return gc.get_freeze_count(), len(gc.get_objects()), made() is None

before = len(gc.get_objects())
frozen, left, is_collected = main()
print(json.dumps([before, frozen, left, is_collected]))
"""


@pytest.mark.slow
def test_imports_are_frozen_and_cycles_collected(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True
    )
    before, frozen, left, is_collected = json.loads(done.stdout)
    assert frozen > 0.99 * before > 9 * left  # a few objects of the script may end meanwhile
    assert is_collected

"""On another system than Linux, an import fails with one clear sentence."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, sys
import torch.utils.data  # reads sys.platform itself
sys.platform = "darwin"
import outlast, outlast.errors
print(outlast.errors.StoreError.__name__)
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError as e:
        print(e)
"""


def test_what_needs_linux_says_so_when_it_is_imported() -> None:
    names = ["inprocess", "async_checkpoint", "elastic", "launch.cli", "chaos"]
    program = PROGRAM.format(names=[f"outlast.{name}" for name in names])
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    first, *errors = run.stdout.splitlines()
    assert first == "StoreError"
    assert len(errors) == len(names)
    for error in errors:
        assert error.startswith("outlast needs Linux, and this is darwin: ")

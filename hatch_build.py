"""Compiles what the package has in C, when it is built or installed for editing.

The package works without: so where there is no compiler, or another processor, nothing is compiled
and the wheel is one for all machines. `OUTLAST_NO_COMPILER=1` asks for that.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "src/outlast/async_checkpoint/snapshot/nontemporal_copy.c"
LIBRARY = "src/outlast/async_checkpoint/snapshot/_nontemporal_copy.so"


class NontemporalCopy(BuildHookInterface[Any]):
    """The build hook that pyproject.toml names."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and has the wheel take it along."""
        root = Path(self.root)
        library = root / LIBRARY
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        if (
            os.environ.get("OUTLAST_NO_COMPILER")
            or not sys.platform.startswith("linux")
            or platform.machine() != "x86_64"
            or shutil.which(compiler[0]) is None
        ):
            self.app.display_info("outlast: nothing is compiled; copies of memory are slower")
            library.unlink(missing_ok=True)
            return
        # Whole or not at all: a process may be loading the one that is there.
        partial = library.with_suffix(f".{os.getpid()}.partial")
        command = [*compiler, "-O2", "-fPIC", "-shared", "-o", str(partial), str(root / SOURCE)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            self.app.display_warning(f"outlast: {shlex.join(command)} failed:\n{made.stderr}")
            partial.unlink(missing_ok=True)
            library.unlink(missing_ok=True)
            return
        partial.replace(library)
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"
        build_data["artifacts"].append(LIBRARY)

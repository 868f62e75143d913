"""Environment variables: the only module of this package that reads `os.environ`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def events_folder() -> str:
    """The folder for events; an empty string for none."""
    return os.environ.get("OUTLAST_EVENTS_DIR", "")


def local_ranks() -> int:
    """The number of ranks on this host, as set by the launcher; 1 by default."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(value)) if value.isdigit() else 1


def ranks() -> int:
    """The number of ranks, as set by the launcher; 1 by default."""
    value = os.environ.get("WORLD_SIZE", "1")
    return max(1, int(value)) if value.isdigit() else 1


def runtime_folder() -> Path:
    """A folder for this user's sockets, which may not exist yet."""
    return Path(tempfile.gettempdir()) / f"outlast-{os.getuid()}"

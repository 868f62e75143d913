"""The one place of this room that reads `os.environ`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["events_folder", "runtime_folder"]


def events_folder() -> str:
    """Where to write events; an empty string for nowhere."""
    return os.environ.get("OUTLAST_EVENTS_DIR", "")


def runtime_folder() -> Path:
    """A folder for this user's sockets. It need not exist."""
    return Path(tempfile.gettempdir()) / f"outlast-{os.getuid()}"

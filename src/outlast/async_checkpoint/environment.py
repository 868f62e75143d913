"""The one place of this room that reads `os.environ`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["events_folder", "local_ranks", "ranks", "runtime_folder"]


def events_folder() -> str:
    """Where to write events; an empty string for nowhere."""
    return os.environ.get("OUTLAST_EVENTS_DIR", "")


def local_ranks() -> int:
    """How many ranks the launcher has started on this host; 1 if it does not say."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(value)) if value.isdigit() else 1


def ranks() -> int:
    """How many ranks the launcher has started; 1 if it does not say."""
    value = os.environ.get("WORLD_SIZE", "1")
    return max(1, int(value)) if value.isdigit() else 1


def runtime_folder() -> Path:
    """A folder for this user's sockets. It need not exist."""
    return Path(tempfile.gettempdir()) / f"outlast-{os.getuid()}"

"""What the tests of adapters share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a short name: the sockets of `DataLoader` workers are in there."""
    return tmp_path_factory.mktemp("d")

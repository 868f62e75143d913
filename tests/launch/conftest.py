"""Fixtures of the launcher tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _launchers_come_from(zygote: object) -> None:
    """`runs.Run` takes the shared zygote."""

"""Hosts in network namespaces, for tests; a skip with the reason where they cannot be made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from network import Network, unavailable


@pytest.fixture(scope="session")
def _allowed() -> None:
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture
def network(_allowed: None) -> Iterator[Network]:
    """A network with the hosts h1, h2 and h3."""
    with Network(["h1", "h2", "h3"]) as network:
        yield network

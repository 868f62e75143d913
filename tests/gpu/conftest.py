"""Tests on a GPU are not checked for leaks: the driver has threads and descriptors of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leaks import no_leaks


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        yield
        return
    with no_leaks():
        yield

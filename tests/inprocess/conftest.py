"""Fixtures of the tests of restart in place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outlast.inprocess.monitor.shared_page import SharedPage


@pytest.fixture
def page() -> Iterator[SharedPage]:
    made = SharedPage()
    yield made
    made.close()

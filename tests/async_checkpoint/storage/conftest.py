"""The S3 server of the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from async_checkpoint.storage.s3 import Server, serving


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(tmp_path_factory.mktemp("s3"), patch.setenv) as server,
    ):
        yield server

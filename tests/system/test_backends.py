"""What a restart needs of each backend of a device: stand-ins for torch's."""

from __future__ import annotations

import logging

import pytest

from outlast.system import backends
from outlast.system.backends import Backend


class OfTorch:
    """A backend of torch with this name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _get_backend_name(self) -> str:
        return self.name

    def _get_sequence_number_for_group(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("name", "abort_s"), [("nccl", 30), ("nccl2", 30), ("nccl-lazy", 30), ("hccl", 10)]
)
def test_each_has_its_time_for_an_abort(name: str, abort_s: float) -> None:
    found = Backend(OfTorch(name))
    assert (found.name, found.begun(), found.abort_s) == (name, 7, abort_s)


def test_a_backend_that_is_not_known_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    backends._say_unknown.cache_clear()
    with caplog.at_level(logging.INFO, logger="outlast.devices"):
        for name in ("other", "other", "nccl"):
            Backend(OfTorch(name))
    assert [each.getMessage().split()[2] for each in caplog.records] == ["other"]

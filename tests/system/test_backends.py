"""What a restart needs of each backend of a device: stand-ins for torch's."""

from __future__ import annotations

import logging

import pytest

from outlast.system import backends
from outlast.system.backends import Backend, Nccl, serving


class OfTorch:
    """A backend of torch with this name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _get_backend_name(self) -> str:
        return self.name

    def _get_sequence_number_for_group(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("name", "kind"), [("nccl", Nccl), ("nccl2", Nccl), ("nccl-lazy", Nccl), ("hccl", Backend)]
)
def test_each_has_its_class(name: str, kind: type[Backend]) -> None:
    found = serving(OfTorch(name))
    assert type(found) is kind
    assert (found.name, found.begun()) == (name, 7)


def test_a_backend_that_is_not_known_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    backends._say_unknown.cache_clear()
    with caplog.at_level(logging.INFO, logger="outlast.devices"):
        for name in ("other", "other", "nccl"):
            serving(OfTorch(name))
    assert [each.getMessage().split()[2] for each in caplog.records] == ["other"]

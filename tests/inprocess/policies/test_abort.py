"""A composed abort: each part ends what it must, whatever the others do."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.inprocess import Compose
from outlast.inprocess.abort import Abort, run_all
from outlast.inprocess.compose import iter_parts
from outlast.inprocess.state import State


class Part(Abort):
    def __init__(self, name: str, called: list[str], error: Exception | None = None) -> None:
        self.name, self.called, self.error = name, called, error

    def __call__(self, state: State) -> Any:
        self.called.append(self.name)
        if self.error is not None:
            raise self.error


def test_a_part_that_raises_leaves_out_none_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    called: list[str] = []
    fails = [Part(name, called, ValueError(name)) for name in ("second", "fourth")]
    parts = Compose(
        Part("last", called), fails[1], Compose(Part("third", called), fails[0]), Part("1", called)
    )
    with pytest.raises(ValueError, match="second"):
        run_all(iter_parts(parts), State(0, 1, 0, 1))
    assert called == ["1", "second", "third", "fourth", "last"]
    (other,) = caplog.records
    assert other.exc_info is not None
    assert str(other.exc_info[1]) == "fourth"

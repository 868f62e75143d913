"""What gloo.py needs of torch's build is checked once; the rest is left out, and named."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from outlast.inprocess.interruption import gloo
from outlast.inprocess.interruption.gloo import GlooAbort


@pytest.fixture(autouse=True)
def _checked_anew() -> Iterator[None]:
    gloo._code.cache_clear()
    yield
    gloo._code.cache_clear()


def test_this_build_fits(caplog: pytest.LogCaptureFixture) -> None:
    GlooAbort().shut_down()
    assert [name for _, name in gloo._code()].count(gloo._BUFFER) == 2
    assert gloo._function(gloo._SIGNALS) is None or not caplog.records


@pytest.mark.parametrize("lost", ["symbol", "type"])
def test_a_build_that_does_not_fit_is_not_called_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    if lost == "symbol":
        monkeypatch.setitem(gloo._CALLS, gloo._BUFFER, ("_ZN4gloo7renamedEv",))
    else:
        monkeypatch.setattr(gloo, "type_name", lambda memory, address: b"N4gloo5OtherE")
    caplog.set_level(logging.WARNING, "outlast.inprocess")
    for _ in range(2):
        abort = GlooAbort()
        assert not abort.shut_down()
        assert abort.wake_blocked(settled=True) == 0
    assert gloo._BUFFER not in [name for _, name in gloo._code()]
    (warning,) = caplog.messages
    assert ("_ZN4gloo7renamedEv" if lost == "symbol" else "UnboundBuffer") in warning
    assert "timeout=" in warning

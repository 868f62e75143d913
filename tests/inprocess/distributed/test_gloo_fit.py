"""What gloo_abort.py needs of torch's build is checked once; the rest is left out, and named."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from outlast.inprocess.distributed import gloo_abort
from outlast.inprocess.distributed.gloo_abort import GlooAbort


@pytest.fixture(autouse=True)
def _checked_anew() -> Iterator[None]:
    gloo_abort._code.cache_clear()
    yield
    gloo_abort._code.cache_clear()


def test_this_build_fits(caplog: pytest.LogCaptureFixture) -> None:
    GlooAbort().shut_down()
    assert [name for _, name in gloo_abort._code()].count(gloo_abort._BUFFER) == 2
    assert gloo_abort._function(gloo_abort._SIGNALS) is None or not caplog.records


@pytest.mark.parametrize("lost", ["symbol", "type"])
def test_a_build_that_does_not_fit_is_not_called_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    if lost == "symbol":
        monkeypatch.setitem(gloo_abort._CALLS, gloo_abort._BUFFER, ("_ZN4gloo7renamedEv",))
    else:
        monkeypatch.setattr(gloo_abort, "type_name", lambda memory, address: b"N4gloo5OtherE")
    caplog.set_level(logging.WARNING, "outlast.inprocess")
    for _ in range(2):
        abort = GlooAbort()
        assert not abort.shut_down()
        assert abort.wake_blocked(settled=True) == 0
    assert gloo_abort._BUFFER not in [name for _, name in gloo_abort._code()]
    (warning,) = caplog.messages
    assert ("_ZN4gloo7renamedEv" if lost == "symbol" else "UnboundBuffer") in warning
    assert "timeout=" in warning

"""Exit codes and signals in words."""

from __future__ import annotations

import signal

import pytest

from outlast.system.error_text import exit_text, signal_name


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-(signal.SIGRTMIN + 6), "was killed by SIGRTMIN+6"),
        (-200, "was killed by signal 200"),
    ],
)
def test_an_exit_code(code: int, text: str) -> None:
    assert exit_text(code) == text


def test_every_signal_has_a_name() -> None:
    for number in signal.valid_signals():
        assert signal_name(number)

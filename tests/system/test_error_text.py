"""Exit codes and signals in words."""

from __future__ import annotations

import signal

import pytest

from outlast.system.error_text import describe, exit_text, first_line, signal_name, traceback_text
from outlast.system.frames import user_place, user_traceback


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


def test_an_odd_message_can_be_sent_and_printed() -> None:
    try:
        exec(
            compile(
                "raise ValueError('a\\r\\nb \\ud800 \\x1b[2J\\x00\\r')",
                "odd\udc80\nfile.py",
                "exec",
            )
        )
    except ValueError as e:
        texts = [
            describe(e),
            first_line(e),
            traceback_text(e),
            user_traceback(e, 10_000),
            user_place(e),
        ]
    for text in texts:
        text.encode()
        assert not {"\r", "\x1b", "\x00"} & set(text)
    assert texts[0] == "ValueError: a\nb \\ud800 \\x1b[2J\\x00\\x0d"
    assert texts[1] == "a"
    assert texts[4] == r"odd\udc80\nfile.py:1 in <module>"

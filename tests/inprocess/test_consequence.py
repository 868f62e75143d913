"""Exceptions as facts: echoes of broken connections, circles, messages that cannot be made."""

from __future__ import annotations

from outlast.inprocess.consequence import describe, is_consequence, let_go


def raised(error: BaseException, cause: BaseException | None) -> BaseException:
    try:
        raise error from cause
    except BaseException as e:  # noqa: BLE001 - to be looked at
        return e


class Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("no message")


def test_an_echo_is_known_by_its_words_also_behind_another_error() -> None:
    echo = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert is_consequence(echo)
    assert is_consequence(raised(ValueError("mine"), echo))
    assert not is_consequence(ValueError("Connection closed by peer"))


def test_an_error_raised_from_itself_is_no_endless_chain() -> None:
    circle = ValueError("mine")
    circle.__cause__ = circle
    assert not is_consequence(circle)
    let_go(circle)


def test_an_error_without_a_message_is_described_by_its_type() -> None:
    assert describe(Mute()).startswith("Mute: ")
    assert not is_consequence(Mute())
    assert describe(ValueError()) == "ValueError"

"""Interrupts and echoes of broken connections, in chains and cycles of exceptions."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from outlast.coordination.stores.tcp_client import SharedClient
from outlast.errors import RankShouldRestart, StoreError
from outlast.inprocess.interruption.error_kinds import is_consequence, is_interrupt, overtaken
from outlast.system.error_text import first_line, release_frames


def raised(error: BaseException, cause: BaseException | None) -> BaseException:
    try:
        raise error from cause
    except BaseException as e:  # noqa: BLE001 - to be looked at
        return e


def interrupted(error: BaseException) -> BaseException:
    """The interrupt, raised while `error` is on its way out."""
    try:
        try:
            raise error
        finally:
            raise RankShouldRestart
    except RankShouldRestart as e:
        return e


class Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("no message")


def test_an_echo_is_known_by_its_words_also_behind_another_error() -> None:
    echo = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert is_consequence(echo)
    assert is_consequence(raised(ValueError("mine"), echo))
    assert not is_consequence(ValueError("Connection closed by peer"))
    # of nccl2, after an abort, and when another rank does not come
    assert is_consequence(RuntimeError("NCCL AllReduce failed: bad \nNCCL Last Error: none"))
    assert is_consequence(RuntimeError("NCCL operation timed out"))


def test_an_error_raised_from_itself_is_no_endless_chain() -> None:
    circle = ValueError("mine")
    circle.__cause__ = circle
    assert not is_consequence(circle)
    release_frames(circle)


def test_an_error_without_a_message_is_described_by_its_type() -> None:
    assert first_line(Mute(), with_type=True).startswith("Mute: ")
    assert not is_consequence(Mute())
    assert first_line(ValueError(), with_type=True) == "ValueError"


def test_what_was_made_of_the_interrupt_is_an_interrupt_but_for_an_exit() -> None:
    assert is_interrupt(RankShouldRestart())
    assert is_interrupt(raised(ValueError("wrapped"), RankShouldRestart()))
    assert not is_interrupt(raised(SystemExit(1), RankShouldRestart()))
    assert not is_interrupt(ValueError("mine"))


def test_the_interrupt_overtakes_an_exception_but_no_echo() -> None:
    mine = KeyError("mine")
    assert overtaken(interrupted(mine), None) is mine
    assert overtaken(raised(ValueError("in the cleanup"), interrupted(mine)), None) is mine
    assert overtaken(interrupted(RuntimeError("Connection closed by peer")), None) is None
    assert overtaken(interrupted(SystemExit(1)), None) is None


def test_nothing_is_overtaken_by_what_comes_after_the_interrupt() -> None:
    assert overtaken(RankShouldRestart(), None) is None
    assert overtaken(raised(ValueError("in the cleanup"), RankShouldRestart()), None) is None
    assert overtaken(ValueError("mine"), None) is None
    again = interrupted(raised(ValueError("in the cleanup"), RankShouldRestart()))
    assert overtaken(again, None) is None  # the interrupt is repeated


def test_a_repeated_interrupt_hides_nothing() -> None:
    mine = KeyError("mine")
    cleanup = raised(ValueError("in the cleanup"), interrupted(mine))
    assert overtaken(interrupted(cleanup), None) is mine


def test_the_end_of_a_connection_to_a_store_is_not_overtaken() -> None:
    """The abort ends it below a rank that waits for the others; the interrupt comes before, while
    or after the client has made a `StoreError` of it.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = SharedClient("127.0.0.1", server.port, 60.0)
    mine = KeyError("mine")
    timer = threading.Timer(0.1, client.break_off)
    timer.start()
    try:
        with pytest.raises(StoreError) as lost:
            try:
                raise mine
            finally:
                client.wait_for("k", None)
    finally:
        timer.join()
        client.close()
    below, ended = RankShouldRestart(), lost.value.__cause__
    assert ended is not None
    below.__context__ = ended
    for error in (lost.value, interrupted(lost.value), below):
        assert overtaken(error, None) is mine
    ended.__context__ = None
    for error in (lost.value, interrupted(lost.value), below):
        assert overtaken(error, None) is None


def test_what_is_handled_outside_of_the_function_is_not_overtaken() -> None:
    outside = raised(KeyError("outside"), OSError("before"))
    assert overtaken(interrupted(outside), outside) is None
    mine = KeyError("mine")
    mine.__context__ = outside
    assert overtaken(interrupted(mine), outside) is mine

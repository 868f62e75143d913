"""What a user sees of a traceback: the own lines, and those of installed packages."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

import pytest

from outlast.chaos.plan import load_json
from outlast.errors import ChaosError
from outlast.system.frames import (
    in_own_code,
    user_place,
    user_place_of,
    user_traceback,
)
from outlast.system.processes import readable


def raised(function: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        function()  # type: ignore[operator]
    return caught.value


def step() -> None:
    json.loads("{")


def reads(path: object) -> None:
    load_json(path)  # type: ignore[arg-type]


def test_the_place_is_the_innermost_line_of_the_user() -> None:
    error = raised(step)
    line = step.__code__.co_firstlineno + 1
    assert user_place(error) == f"test_frames.py:{line} in step"
    assert "in decode" in user_traceback(error, 10_000)  # a library's frames stay


def test_the_frames_of_this_package_are_left_out(tmp_path: object) -> None:
    error = raised(lambda: reads(tmp_path / "none"))  # type: ignore[operator]
    assert isinstance(error, ChaosError)
    text = user_traceback(error, 10_000)
    assert "chaos/plan.py" not in text
    assert "in reads" in text
    assert "direct cause" in text
    assert text.rstrip().endswith("No such file or directory")
    assert user_place(error).endswith(" in reads")


def test_a_long_traceback_keeps_its_end() -> None:
    assert user_traceback(raised(step), 20).endswith("(char 1)\n")
    assert len(user_traceback(raised(step), 20)) == 20


def test_a_thread_is_in_this_package_if_that_has_called_what_it_does() -> None:
    ours, theirs = socket.socketpair()
    ident, found = threading.get_ident(), list[tuple[str, bool]]()

    def look(name: str) -> None:
        while (frame := sys._current_frames()[ident]).f_code.co_name != name:
            time.sleep(0.001)
        found.append((user_place_of(frame), in_own_code(frame)))
        theirs.send(b"x")

    with ours, theirs:
        for name, wait in (
            ("<lambda>", lambda: ours.recv(1)),
            ("readable", lambda: readable(ours.fileno())),
        ):
            looking = threading.Thread(target=look, args=(name,))
            looking.start()
            wait()
            looking.join()
    assert [own for _, own in found] == [False, True]
    assert all(place.startswith("test_frames.py:") for place, _ in found)

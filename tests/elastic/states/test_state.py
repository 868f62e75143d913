"""The registry: live states by name, and the names of their files."""

from __future__ import annotations

import gc
import os

import hypothesis
import pytest
from hypothesis import strategies as st

from elastic.text_state import Text
from outlast.elastic import State
from outlast.elastic.states.state import file_name, name_of, registered

# Any text, even one that no encoding accepts: half of a surrogate pair.
NAMES = st.text(st.characters(), max_size=300)
ODD = ["", ".", "..", "/", "a/b", "../up", "manifest.json", "%", "a b", "\0", "ä" * 100, "x" * 5000]


@hypothesis.given(NAMES)
@hypothesis.example("")
def test_a_name_makes_one_plain_file_name(name: str) -> None:
    file = file_name(name)
    assert file == os.path.basename(file)
    assert file not in ("", ".", "..", "manifest.json")
    assert len(os.fsencode(file)) <= 255
    assert file.isascii()
    assert file.isprintable()


@hypothesis.given(st.lists(NAMES, unique=True, max_size=20))
@hypothesis.example(ODD)
@hypothesis.example(["x" * 5000, "x" * 5001, "+", "%2B", "A", "a", "%"])
def test_no_two_names_share_a_file(names: list[str]) -> None:
    assert len({file_name(name) for name in names}) == len(names)


def test_two_live_states_of_one_name() -> None:
    first = Text("model")
    with pytest.raises(ValueError, match="a state named 'model' exists already"):
        Text("model")
    assert registered() == {"model": first}


def test_a_dead_state_leaves_its_name() -> None:
    state = Text("model")
    del state
    assert registered() == {}
    assert registered() == {} == dict.fromkeys(registered())
    again = Text("model")
    assert registered() == {"model": again}


def test_a_dead_state_in_a_cycle_leaves_its_name() -> None:
    gc.disable()
    try:
        state = Text("model")
        state.calls.append(state)  # type: ignore[arg-type]
        del state
        again = Text("model")
    finally:
        gc.enable()
    assert registered() == {"model": again}


def test_a_state_that_failed_to_be_made_leaves_its_name() -> None:
    class Broken(State):
        def __init__(self) -> None:
            super().__init__("broken")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        Broken()
    Text("broken")


def test_the_order_is_that_of_the_names() -> None:
    states = [Text("b"), Text("c"), Text("a")]
    assert list(registered()) == ["a", "b", "c"]
    assert [name_of(state) for state in states] == ["b", "c", "a"]


def test_a_name_is_text() -> None:
    with pytest.raises(TypeError, match="must be a string, not int"):
        Text(1)  # type: ignore[arg-type]


def test_a_state_without_a_name() -> None:
    class Nameless(State):
        def __init__(self) -> None:
            pass

    with pytest.raises(ValueError, match="this Nameless has no name"):
        name_of(Nameless())


def test_a_state_with_its_own_equality_and_no_hash() -> None:
    class Equal(State):
        def __eq__(self, other: object) -> bool:
            return True

    states = [Equal("a"), Equal("b")]  # no hash either
    assert [name_of(state) for state in states] == ["a", "b"]
    with pytest.raises(ValueError, match="'a' exists already"):
        Equal("a")

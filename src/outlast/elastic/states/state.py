"""`State`: a piece of a job's state that outlives the job, and has the same value on all replicas.

    class Best(State):
        def __init__(self):
            super().__init__("best")
            self.loss = math.inf

        def save(self, fileobj):
            fileobj.write(json.dumps(self.loss).encode())

        def load(self, fileobj):
            self.loss = json.load(fileobj)

    best = Best()
    load_state(best)        # what an earlier run of the job saved, at whatever size
    ...
    save_all_states()

The states of a process are known by name, and only for as long as the program holds them.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import BinaryIO

__all__ = ["State", "name_of", "registered"]

_lock = threading.RLock()  # a collection of garbage may make or end states
_by_name: weakref.WeakValueDictionary[str, State] = weakref.WeakValueDictionary()
_NAME = "_outlast_name"  # an attribute that no subclass has a use for


class State:
    """A piece of state that is saved, and loaded again by a job of any size. To be subclassed.

    Args:
        name: any text. It is the same on all replicas, and in the job that loads.

    Raises:
        ValueError: if another state of this name is alive.
        TypeError: if the name is no text.
    """

    def __init__(self, name: str) -> None:
        _register(self, name)

    def save(self, fileobj: BinaryIO) -> None:
        """Writes the state to a binary file. Called on rank 0 only."""

    def load(self, fileobj: BinaryIO) -> None:
        """Reads the state back. Called on every replica."""

    def sync(self) -> None:
        """Makes the state consistent over the replicas. Called on every replica before a save, in
        the order of the names, so that it may use collectives.
        """

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        """Reads and checks what was saved; returns what applies it, which should not fail any more.

        `load_all_states` applies nothing before all states are prepared, on all replicas. A state
        that has no `prepare` of its own is loaded when the others are applied.
        """
        return lambda: self.load(fileobj)


def _register(state: State, name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a state is text, not {type(name).__name__}")
    with _lock:
        if _taken(name, state):
            gc.collect()  # it may be dead, and kept by a reference cycle alone
            if _taken(name, state):
                raise ValueError(
                    f"a state named {name!r} is alive already: two of one name would overwrite "
                    "each other"
                )
        known = state.__dict__.get(_NAME)
        if known is not None:
            _by_name.pop(known, None)
        _by_name[name] = state
        state.__dict__[_NAME] = name


def _taken(name: str, state: State) -> bool:
    return _by_name.get(name, state) is not state


def registered() -> dict[str, State]:
    """The states that are alive, by name, in the order of the names: the same on all replicas."""
    with _lock:
        return dict(sorted(_by_name.items()))


def name_of(state: State) -> str:
    """Its name.

    Raises:
        ValueError: if `State.__init__` was never called for it.
    """
    name = state.__dict__.get(_NAME)
    if name is None:
        raise ValueError(
            f"this {type(state).__name__} has no name: its __init__ must call State.__init__"
        )
    return str(name)

"""`State`: a piece of state that is saved and loaded, with the same value on all replicas.

    class Best(State):
        def __init__(self):
            super().__init__("best")
            self.loss = math.inf

        def save(self, fileobj):
            fileobj.write(json.dumps(self.loss).encode())

        def load(self, fileobj):
            self.loss = json.load(fileobj)

    best = Best()
    load_state(best)        # as an earlier run of the job saved it, at any size
    ...
    save_all_states()

The registry holds the states of a process by name, and only while the program refers to them. In a
checkpoint, each has the name of a file.
"""

from __future__ import annotations

import gc
import threading
import urllib.parse
import weakref
from collections.abc import Callable
from typing import BinaryIO

from outlast.async_checkpoint.inspection import checksum

_lock = threading.RLock()  # reentrant: garbage collection may create or finalize states
_by_name: weakref.WeakValueDictionary[str, State] = weakref.WeakValueDictionary()
_NAME = "_outlast_name"  # an attribute that no subclass uses

_SUFFIX = ".state"
_LONGEST = 200  # file systems allow 255 bytes
_KEPT = 100
_EMPTY = "%"  # no quoted name is equal to this


class State:
    """A piece of state that is saved, and loaded by a job of any size. Meant to be subclassed.

    Args:
        name: any text. It must be the same on all replicas, and in the job that loads.

    Raises:
        ValueError: if another live state has this name.
        TypeError: if the name is not a string.
    """

    def __init__(self, name: str) -> None:
        _register(self, name)

    def save(self, fileobj: BinaryIO) -> None:
        """Writes the state to a binary file. Called on rank 0 only."""

    def load(self, fileobj: BinaryIO) -> None:
        """Reads the state back. Called on every replica."""

    def sync(self) -> None:
        """Makes the state consistent over the replicas. Called on every replica before a save, in
        the order of the states' names, so it may use collectives.
        """

    def prepare(self, fileobj: BinaryIO) -> Callable[[], None]:
        """Reads and checks the saved state; returns a function that applies it and should not fail.

        `load_all_states` applies no state before all are prepared, on all replicas. A state that
        does not override this method is loaded when the others are applied.
        """
        return lambda: self.load(fileobj)


class PreparedState(State):
    """A state that overrides `prepare`; `load` applies what that returns."""

    def load(self, fileobj: BinaryIO) -> None:
        self.prepare(fileobj)()


def _register(state: State, name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a state must be a string, not {type(name).__name__}")
    with _lock:
        if _taken(name, state):
            gc.collect()  # the other state may only be kept alive by a reference cycle
            if _taken(name, state):
                raise ValueError(
                    f"a state named {name!r} exists already: two states of one name would "
                    "overwrite each other"
                )
        known = state.__dict__.get(_NAME)
        if known is not None:
            _by_name.pop(known, None)
        _by_name[name] = state
        state.__dict__[_NAME] = name


def _taken(name: str, state: State) -> bool:
    return _by_name.get(name, state) is not state


def registered() -> dict[str, State]:
    """The live states by name, sorted by name: in the same order on all replicas."""
    with _lock:
        return dict(sorted(_by_name.items()))


def name_of(state: State) -> str:
    """The name of a state; a `ValueError` if its `__init__` did not call `State.__init__`."""
    name = state.__dict__.get(_NAME)
    if name is None:
        raise ValueError(
            f"this {type(state).__name__} has no name: its __init__ must call State.__init__"
        )
    return str(name)


def file_name(name: str) -> str:
    """The name of the file, and of the tensor in a checkpoint, of the state `name`: any text. All
    but letters, digits and `_.-~` is written `%XX`, byte by byte of the UTF-8: no two states share
    a file, and none is outside the folder. A name too long for a file system is cut and gets a
    checksum of the whole name after a `+`, which no quoted name contains.
    """
    data = name.encode("utf-8", "surrogatepass")
    quoted = urllib.parse.quote(data, safe="")
    if len(quoted) > _LONGEST:
        quoted = f"{quoted[:_KEPT]}+{checksum(data)}"
    return (quoted or _EMPTY) + _SUFFIX

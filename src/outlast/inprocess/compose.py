"""`Compose`: several parts as one, so that the wrapper takes one argument for each kind of part.

`Compose(a, b, c)(x)` is `a(b(c(x)))`: written as mathematicians write it, run from right to left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["Compose", "iter_parts"]

P = TypeVar("P", bound=Callable[..., Any])


class Compose:
    """Calls its parts from right to left, each with what the one before it returned.

    The rightmost part gets the arguments of the call. When a part returns a `tuple` (that very
    type: a named tuple is one value), its items are the arguments of the next part; anything else
    is its only argument. So parts that take and return `(state, train_ex)` or `(state,
    terminated_ranks)` compose as they are.

    The object is an instance of the closest common base of its parts, which is the first class
    in the method resolution order of the first part that all the other parts have too:
    `Compose(ShiftRanks(), FillGaps())` is a `RankAssignment`. A base of which no instance can be
    made (the type of plain functions, a class with more abstract methods than `__call__`) is
    passed over for the next one, at last for `object`. A composition of compositions has the
    base of all the parts in it.

    Args:
        *parts: instances of parts, or any callables.

    Raises:
        TypeError: if there is no part, if one cannot be called, or if one is the class of a part
            where an instance is meant.
    """

    _parts: tuple[Callable[..., Any], ...]

    # To a type checker the result is what the parts have in common, as it is to isinstance().
    def __new__(cls, *parts: P) -> P:  # type: ignore[misc]
        """Makes an instance of `cls` and of the closest common base."""
        if not parts:
            raise TypeError("Compose() needs at least one part")
        for number, part in enumerate(parts):
            _check_part(number, part)
        leaves = [leaf for part in parts for leaf in iter_parts(part)]
        for base in type(leaves[0]).__mro__:
            composed = _instance(cls, base) if all(_isa(leaf, base) for leaf in leaves) else None
            if composed is not None:
                break
        else:  # a part without `object` in its order does not exist
            raise AssertionError(leaves)
        # The base may guard its attributes, as a frozen dataclass does.
        object.__setattr__(composed, "_parts", parts)
        return composed  # type: ignore[no-any-return]

    # Out of sight of type checkers, which would take its result for that of the call.
    if not TYPE_CHECKING:

        def __init__(self, *parts: Callable[..., Any]) -> None:
            """Keeps the `__init__` of the base from being called: the parts have had theirs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the rightmost part with the arguments, and so on to the left."""
        *others, first = self._parts
        result = first(*args, **kwargs)
        for part in reversed(others):
            result = part(*result) if type(result) is tuple else part(result)
        return result

    @property
    def parts(self) -> tuple[Callable[..., Any], ...]:
        """The parts as they were given, from left to right."""
        return self._parts

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self._parts))})"


def iter_parts(part: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The single parts of `part` in the order in which they are called, right to left.

    Goes into compositions of compositions. What is no `Compose` is its own single part.
    """
    if not isinstance(part, Compose):
        yield part
        return
    for inner in reversed(part.parts):
        yield from iter_parts(inner)


def _isa(part: object, base: type) -> bool:
    """Whether `base` stands in the order of the part's type; no virtual subclasses."""
    return base in type(part).__mro__


def _instance(cls: type, base: type) -> Any:
    """An empty instance of both, or `None` where `base` does not allow that."""
    try:
        composed = cls if base is object else type(cls.__name__, (cls, base), {"__doc__": None})
        return object.__new__(composed)
    except TypeError:
        return None


def _check_part(number: int, part: object) -> None:
    if not callable(part):
        raise TypeError(f"Compose: part {number} must be callable, not {part!r}")
    if isinstance(part, type) and any("__call__" in vars(base) for base in part.__mro__):
        raise TypeError(
            f"Compose: part {number} is the class {part.__name__}; an instance is meant: "
            f"{part.__name__}(...)"
        )

"""`Compose`: combines several policies into one, since the wrapper takes one of each kind.

`Compose(a, b, c)(x)` is `a(b(c(x)))`, as in mathematical notation: evaluated from right to left.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

P = TypeVar("P", bound=Callable[..., Any])


class Compose:
    """Calls its parts from right to left, each with the return value of the one before it.

    The rightmost part gets the arguments of the call. If a part returns a `tuple` (exactly that
    type: a named tuple is one value), its items are the arguments of the next part; any other
    value is the only argument. Therefore, parts that take and return `(state, train_ex)` or
    `(state, terminated_ranks)` compose without adapters.

    After a part that returned `None`, a part that can be called without arguments is called without
    any, unless the part before it was called with arguments and this one has parameters. A part
    that was called with arguments and returned `None` has probably forgotten its `return`: it
    causes a `UserWarning`, except before a part without parameters, and the next part gets `None`.

    The object is an instance of the closest common base of its parts, which is the first class in
    the method resolution order of the first part that all other parts share:
    `Compose(ShiftRanks(), FillGaps())` is a `RankAssignment`. A base that cannot be instantiated
    (the type of plain functions, a class with more abstract methods than `__call__`) is skipped
    in favor of the next one, and finally of `object`. A composition of compositions has the common
    base of all their parts.

    Args:
        *parts: policy instances, or any callables.

    Raises:
        TypeError: if there is no part, if one is not callable, or if one is a class where an
            instance is expected.
    """

    _parts: tuple[Callable[..., Any], ...]

    # To a type checker, as to isinstance(), the result has the common type of the parts.
    def __new__(cls, *parts: P) -> P:  # type: ignore[misc]
        """Creates an instance of `cls` and of the closest common base."""
        if not parts:
            raise TypeError("Compose() needs at least one part")
        for number, part in enumerate(parts):
            _check_part(number, part)
        leaves = [leaf for part in parts for leaf in iter_parts(part)]
        for base in type(leaves[0]).__mro__:
            # Not by `isinstance`, which counts virtual subclasses.
            shared = all(base in type(leaf).__mro__ for leaf in leaves)
            composed = _instance(cls, base) if shared else None
            if composed is not None:
                break
        else:  # unreachable: every type has `object` in its MRO
            raise AssertionError(leaves)
        # The base may forbid setting attributes, as a frozen dataclass does.
        object.__setattr__(composed, "_parts", parts)
        return composed  # type: ignore[no-any-return]

    # Hidden from type checkers, which would use its signature for the constructor.
    if not TYPE_CHECKING:

        def __init__(self, *parts: Callable[..., Any]) -> None:
            """Replaces the base's `__init__`: the parts are already initialized."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the rightmost part with the arguments, and so on to the left."""
        *others, part = self._parts
        result = part(*args, **kwargs)
        # A part that gets None and returns None has passed its argument on.
        given = any(value is not None for value in (*args, *kwargs.values()))
        for following in reversed(others):
            before, part = part, following
            if result is None and _is_called_bare(part, after_arguments=given):
                arguments: tuple[Any, ...] = ()
            else:
                arguments = result if type(result) is tuple else (result,)
                if result is None and given:
                    _warn_of_none(before)
            result = part(*arguments)
            given = any(value is not None for value in arguments)
        if result is None and given:
            _warn_of_none(part)
        return result

    @property
    def parts(self) -> tuple[Callable[..., Any], ...]:
        """The parts, from left to right."""
        return self._parts

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self._parts))})"


def iter_parts(part: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The elementary parts of `part`, in call order: right to left, with compositions expanded."""
    if not isinstance(part, Compose):
        yield part
        return
    for inner in reversed(part.parts):
        yield from iter_parts(inner)


def _is_called_bare(part: Callable[..., Any], *, after_arguments: bool) -> bool:
    """Whether `part` is called without arguments after a part that returned `None`."""
    try:
        signature = inspect.signature(part)
        if after_arguments:
            return not signature.parameters
        signature.bind()
    except (TypeError, ValueError):  # it needs arguments, or is a builtin without a signature
        return False
    return True


def _warn_of_none(part: Callable[..., Any]) -> None:
    warnings.warn(
        f"Compose: {part!r} was called with arguments and returned None, so the chain was not "
        "continued with its result; it should return what the next part takes",
        UserWarning,
        stacklevel=3,
    )


def _instance(cls: type, base: type) -> Any:
    """An uninitialized instance of both, or `None` if `base` does not allow it."""
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
            f"Compose: part {number} is the class {part.__name__}; an instance is expected: "
            f"{part.__name__}(...)"
        )

"""Validates the fields of a JSON object; errors name the invalid field and the allowed values."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from outlast.chaos.kinds import Kind
from outlast.errors import ChaosError

E = TypeVar("E", bound=enum.Enum)


def load_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        ChaosError: if it cannot be read or is not JSON; names the file.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ChaosError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ChaosError(f"{path}: not JSON: {error}") from error


class Fields:
    """The fields of one object of a plan, which errors call `where`. Every method raises
    `ChaosError` for an invalid value.
    """

    def __init__(self, values: Any, where: str, allowed: tuple[str, ...]) -> None:
        self._where = where
        if not isinstance(values, dict):
            raise ChaosError(
                f"{where}: is {_show(values)}; it must be an object with fields of these names: "
                f"{_names(allowed)}"
            )
        unknown = [name for name in values if name not in allowed]
        if unknown:
            raise ChaosError(
                f"{where}: unknown field {unknown[0]!r}; it must be one of: {_names(allowed)}"
            )
        self._values = values

    def has(self, name: str) -> bool:
        """Whether the field is present and not `null`."""
        return self._values.get(name) is not None

    def integer(self, name: str) -> int:
        """A non-negative integer."""
        return self._integer(self._get(name), name)

    def number(self, name: str, low: float, high: float) -> float:
        """A finite number between `low` and `high`, inclusive."""
        value = self._get(name)
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not math.isfinite(value) or not low <= value <= high:
            allowed = f"from {low}" if high == math.inf else f"from {low} to {high}"
            raise self._wrong(name, value, f"a number {allowed}")
        return float(value)

    def kind(self, name: str) -> Kind:
        """A kind of fault."""
        return self._choice(self._get(name), name, Kind)

    def choice(self, name: str, choices: type[E]) -> E:
        """A member of an enumeration of strings."""
        return self._choice(self._get(name), name, choices)

    def kinds(self, name: str) -> tuple[Kind, ...]:
        """A list of at least one kind of fault."""
        return tuple(self._choice(value, f"{name}[{i}]", Kind) for i, value in self._list(name))

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of at least one non-negative integer."""
        return tuple(self._integer(value, f"{name}[{i}]") for i, value in self._list(name))

    def items(self, name: str) -> list[Any]:
        """The elements of a list, unchecked; empty if the field is absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return value or []

    def _list(self, name: str) -> list[tuple[int, Any]]:
        value = self._get(name)
        if not isinstance(value, list) or not value:
            raise self._wrong(name, value, "a list with at least one element")
        return list(enumerate(value))

    def _get(self, name: str) -> Any:
        if name not in self._values:
            raise ChaosError(f"{self._where}: field {name!r} is missing")
        return self._values[name]

    def _integer(self, value: Any, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(name, value, "an integer of at least 0")
        return value

    def _choice(self, value: Any, name: str, choices: type[E]) -> E:
        allowed = [choice.value for choice in choices]
        if value not in allowed:
            raise self._wrong(name, value, f"one of: {_names(allowed)}")
        return choices(value)

    def _wrong(self, name: str, value: Any, allowed: str) -> ChaosError:
        return ChaosError(f"{self._where}: field {name!r} is {_show(value)}; it must be {allowed}")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

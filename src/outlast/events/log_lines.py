"""Parses one line of an event log, strictly: names, types and the place of what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from outlast.errors import EventLogError
from outlast.events.types.base import Event, event_from_dict

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "dict[str, Any]": (dict,),
}


def parse_line(line: bytes, place: str) -> Event:
    """The event of a line of a log; `place` is its file and line number, for the error.

    Raises:
        EventLogError: if the line is not an event; names the place.
    """
    try:
        # NaN and Infinity are not JSON: a field of numbers must not have their names.
        values = json.loads(line, parse_constant=str)
    except (ValueError, RecursionError) as error:
        raise EventLogError(f"{place}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise EventLogError(f"{place}: not a JSON object, but {type(values).__name__}")
    if b"\\u" in line:
        values = _encodable(values)
    try:
        event = event_from_dict(values)
    except EventLogError as error:
        raise EventLogError(f"{place}: {error}") from error
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if not _is_of(value, str(field.type)):
            raise EventLogError(
                f"{place}: {field.name!r} of {event.kind!r} is {value!r}, not {field.type}"
            )
    return event


def _is_of(value: object, kind: str) -> bool:
    """Whether `value` is of the type that a field has by this name."""
    if kind.startswith("list["):
        element = kind.removeprefix("list[").removesuffix("]")
        return isinstance(value, list) and all(_is_of(each, element) for each in value)
    if isinstance(value, float) and not math.isfinite(value):  # 1e999
        return False
    # Python counts a bool as an int; a log must not.
    return isinstance(value, bool) == (kind == "bool") and isinstance(value, _TYPES[kind])


def _encodable(value: Any) -> Any:
    """The value with another character for each that no text file may contain: Python writes the
    bytes of a file name that are no UTF-8 as half of a pair of characters.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return value

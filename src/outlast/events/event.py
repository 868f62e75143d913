"""The fields of every event, and how an event is written to a log and read from it."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, ClassVar

import msgspec
from typing_extensions import dataclass_transform

from outlast.errors import EventLogError

EVENT_TYPES: dict[str, type[Event]] = {}


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
class Record:
    """A subclass is a frozen dataclass with keyword arguments only; it needs no decorator."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class Event(Record):
    """The fields of every event.

    Attributes:
        iteration: the restart wrapper's iteration; -1 before the first.
        member: permanent ID of the process in the job; -1 if it has none (a launcher).
        rank: the member's rank in this iteration; -1 if it has none.
        host: name of the host.
        pid: ID of the process that wrote the event.
        time: monotonic seconds, comparable only between processes of one host.
    """

    kind: ClassVar[str] = "event"

    iteration: int = -1
    member: int = -1
    rank: int = -1
    host: str = ""
    pid: int = -1
    time: float = 0.0

    def __init_subclass__(cls, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind
        EVENT_TYPES[kind] = cls


class Note(Event, kind="note"):
    """Anything else, by name, with numbers or text in `data`."""

    name: str = ""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


def event_to_dict(event: Event) -> dict[str, Any]:
    """The event as plain values, with its kind under `"kind"`."""
    return {"kind": event.kind, **vars(event)}


def event_from_dict(values: dict[str, Any]) -> Event:
    """The inverse of `event_to_dict`. Unknown fields are ignored, so that the log of a newer
    version can be read. An `EventLogError` for an unknown kind, or a value of a wrong type.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in EVENT_TYPES:
        raise EventLogError(f"unknown kind of event: {kind!r}; known: {sorted(EVENT_TYPES)}")
    try:
        return msgspec.convert(values, EVENT_TYPES[kind])
    except msgspec.ValidationError as error:
        raise EventLogError(f"{kind!r}: {error}") from error


def parse_line(line: bytes, place: str) -> Event:
    """The event of a line of a log; `place` is its file and line number, for the error. An
    `EventLogError` names the place, and the field that is wrong.
    """
    try:
        values = json.loads(line, parse_constant=str, parse_float=_finite)
        if b"\\u" in line:
            # Python writes the bytes of a file name that are no UTF-8 as half of a pair of
            # characters, which no text file may contain.
            text = json.dumps(values, ensure_ascii=False)
            values = json.loads(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise EventLogError(f"{place}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise EventLogError(f"{place}: not a JSON object, but {type(values).__name__}")
    try:
        return event_from_dict(values)
    except EventLogError as error:
        raise EventLogError(f"{place}: {error}") from error


def _finite(text: str) -> float | str:
    """The number; the text of one that is none, as of NaN, which no field of numbers takes."""
    number = float(text)
    return number if math.isfinite(number) else text

"""The fields of every event, and how an event is written and read.

Every event carries the iteration, the member (one process of the job, with a permanent ID), its
rank at that moment, host, process ID and monotonic time. Durations are measured only by spans (see
`emitter.py`) and are in `seconds`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from outlast.errors import EventLogError

EVENT_TYPES: dict[str, type[Event]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
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
        cls.kind = kind
        EVENT_TYPES[kind] = cls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note(Event, kind="note"):
    """Anything else, by name, with numbers or text in `data`."""

    name: str = ""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


def event_to_dict(event: Event) -> dict[str, Any]:
    """The event as plain values, with its kind under `"kind"`."""
    fields = dataclasses.fields(event)
    return {"kind": event.kind, **{field.name: getattr(event, field.name) for field in fields}}


def event_from_dict(values: dict[str, Any]) -> Event:
    """The inverse of `event_to_dict`. Unknown fields are ignored, so that the log of a newer
    version can be read.

    Raises:
        EventLogError: if the kind is missing or unknown.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in EVENT_TYPES:
        raise EventLogError(f"unknown kind of event: {kind!r}; known: {sorted(EVENT_TYPES)}")
    event_type = EVENT_TYPES[kind]
    known = {f.name for f in dataclasses.fields(event_type)}
    return event_type(**{name: value for name, value in values.items() if name in known})

"""Typed events: the types, where events go, and the report computed from them."""

from outlast.events.emitter import Emitter, JsonlSink, MemorySink, NullSink, Sink, Span
from outlast.events.event import EVENT_TYPES, Event, Note, event_from_dict, event_to_dict
from outlast.events.types import *  # noqa: F403 - all types of events

__all__ = [
    "EVENT_TYPES",
    "Emitter",
    "Event",
    "JsonlSink",
    "MemorySink",
    "Note",
    "NullSink",
    "Sink",
    "Span",
    "event_from_dict",
    "event_to_dict",
    *(event_type.__name__ for event_type in EVENT_TYPES.values() if event_type is not Note),
]

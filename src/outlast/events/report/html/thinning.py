"""Reduces what a chart shows to a bounded number of elements, so that nothing rare disappears."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from outlast.events.report.model import Mark, Span


@dataclasses.dataclass(frozen=True)
class ThinSpan:
    """A span, or short ones of the same state, shown as one of the same total length."""

    span: Span
    count: int = 1


@dataclasses.dataclass(frozen=True)
class ThinMark:
    """A mark, and how many more of its kind are at nearly the same place."""

    mark: Mark
    more: int = 0


def thin_spans(spans: Sequence[Span], limit: int, end: float) -> list[ThinSpan]:
    """At most `limit` spans. Long ones stay. Of the short ones that begin in the same cell, those
    of one state become one span, and the spans of the states stand next to each other.
    """
    if len(spans) <= limit:
        return [ThinSpan(span) for span in spans]
    cells = max(1, limit // (1 + len({span.state for span in spans})))
    width = end / cells
    kept = [ThinSpan(span) for span in spans if span.end - span.start > width]
    groups: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.end - span.start <= width:
            groups[min(cells - 1, int(span.start / width))][span.state].append(span)
    for states in groups.values():
        start = min(group[0].start for group in states.values())
        for state, group in states.items():
            stop = start + sum(span.end - span.start for span in group)
            kept.append(ThinSpan(Span(state=state, start=start, end=stop), len(group)))
            start = stop
    return sorted(kept, key=lambda thin: thin.span.start)


def thin_marks(marks: Sequence[Mark], limit: int, end: float) -> list[ThinMark]:
    """At most `limit` marks for each kind: of those in the same cell, the first."""
    if len(marks) <= limit:
        return [ThinMark(mark) for mark in marks]
    groups: dict[tuple[str, int], list[Mark]] = defaultdict(list)
    for mark in marks:
        groups[mark.kind, int(mark.at / (end or 1.0) * (limit - 1))].append(mark)
    found = [ThinMark(group[0], len(group) - 1) for group in groups.values()]
    return sorted(found, key=lambda thin: thin.mark.at)

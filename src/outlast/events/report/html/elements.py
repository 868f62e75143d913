"""Elements of HTML and SVG. All text is escaped here, in one place: it may come from logs."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is HTML already; everything else is escaped."""

    __slots__ = ()


def tag(name: str, /, *content: str, **attributes: object) -> Markup:
    """An element: `tag("a", "text", class_="b", data_tip="c")`; `None` is no attribute."""
    opened = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(text(each) for each in content)
    if name in ("meta", "col") and not inner:
        return Markup(f"<{name}{opened}>")
    return Markup(f"<{name}{opened}>{inner}</{name}>")


def text(value: object) -> str:
    """The value as HTML: escaped, without control characters, unless it is `Markup`."""
    if isinstance(value, Markup):
        return value
    shown = "".join(c if c.isprintable() or c == "\n" else "�" for c in str(value))
    return html.escape(shown, quote=True)


def join(parts: Iterable[str]) -> Markup:
    """The parts one after another, each escaped unless it is `Markup`."""
    return Markup("".join(text(part) for part in parts))


def percent(part: float) -> str:
    """A fraction as an SVG length, between 0 and 100 %."""
    return f"{min(max(part, 0.0), 1.0) * 100:.3f}%".replace(".000", "")


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str,
    numbers: Sequence[int] = (),
) -> Markup:
    """A table that may be scrolled sideways; the columns `numbers` are aligned to the right."""

    def cell(kind: str, place: int, content: str) -> Markup:
        scope = "col" if kind == "th" else None
        return tag(kind, content, scope=scope, class_="n" if place in numbers else None)

    head = tag("tr", *(cell("th", place, each) for place, each in enumerate(heads)))
    body = [tag("tr", *(cell("td", place, each) for place, each in enumerate(row))) for row in rows]
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def details(summary: str, *content: str) -> Markup:
    """Content that is shown when it is opened, and in print."""
    return tag("details", tag("summary", summary), *content)


def section(title: str, name: str, *content: str) -> Markup:
    """A part of the page with a heading."""
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *content, id=name, aria_labelledby=f"{name}-title")


def key(names: Iterable[tuple[str, str]], *, label: str) -> Markup:
    """The colors of a chart: pairs of class and meaning."""
    entries = [tag("li", tag("i", class_=f"c-{kind}"), meaning) for kind, meaning in names]
    return tag("ul", *entries, class_="key", aria_label=label)

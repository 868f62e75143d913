"""Puts the page together: one file, with its style and its script inside.

The content security policy allows that style and that script, by their hashes, and nothing else: no
request is made, and markup that came from a log could not run.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from importlib.resources import files

from outlast.events.report.html.causes import causes_section
from outlast.events.report.html.checkpoints import checkpoints_section
from outlast.events.report.html.elements import Markup, section, tag
from outlast.events.report.html.overview import goodput_section, head
from outlast.events.report.html.recovery import recovery_section, restarts_section
from outlast.events.report.html.timeline import timeline_section
from outlast.events.report.model import Report
from outlast.events.report.totals import ending

_SECTIONS = {
    "goodput": "Goodput",
    "timeline": "Timeline",
    "recovery": "Recovery",
    "restarts": "What happened",
    "causes": "Causes and hosts",
    "checkpoints": "Checkpoints",
    "end": "The end",
}


def render_html(report: Report, *, title: str, started: str = "") -> str:
    """The page, as the text of an HTML file in UTF-8.

    Args:
        title: the name of the run.
        started: when the run started, in words.
    """
    style, script = _resource("style.css"), _resource("script.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    links = [tag("a", name, href=f"#{anchor}") for anchor, name in _SECTIONS.items()]
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#goodput", class_="skip"),
        head(report, title, started),
        tag("nav", *links, aria_label="Sections"),
        tag(
            "main",
            goodput_section(report),
            timeline_section(report),
            recovery_section(report),
            restarts_section(report),
            causes_section(report),
            checkpoints_section(report.saves),
            _end(report),
        ),
        tag(
            "footer",
            "Times are in seconds from the first event of each host. ",
            "outlast report --json has every fact of this page.",
        ),
        tag("div", id="tip", role="tooltip", hidden=""),
        tag("script", Markup(script)),
    )
    page_head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} - outlast report"),
        tag("style", Markup(style)),
    )
    return f"<!doctype html>\n{tag('html', page_head, body, lang='en')}\n"


def _end(report: Report) -> Markup:
    without_saves = dataclasses.replace(report, saves=None)  # they have a section of their own
    told = [tag("p", sentence) for sentence in ending(without_saves)]
    return section("The end", "end", *told)


def _resource(name: str) -> str:
    return files("outlast.events.report.html").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"

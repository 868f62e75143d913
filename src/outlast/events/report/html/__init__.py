"""The report as one HTML page, which needs nothing else: no other file, no network.

    page = render_html(build(load("build/demo")), title="build/demo")

The number of elements is bounded, whatever the number of events: `--json` has every fact.
"""

from outlast.events.report.html.page import render_html

__all__ = ["render_html"]

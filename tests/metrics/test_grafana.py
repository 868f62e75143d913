"""The Grafana dashboard: it has the form of Grafana's schema, and asks for metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.events.report import PHASE_FIELDS
from outlast.metrics.collect import INSTRUMENTS, MEMBER_STATES, Kind

FILE = Path(__file__).parents[2] / "examples" / "grafana" / "outlast.json"

# Grafana has added these options of panels since the version whose schema the package has.
NEWER = (
    *("wideLayout", "showPercentChange", "percentChangeColorMode"),
    *("maxVizHeight", "namePlacement", "sizing", "legend"),
)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def queries() -> list[str]:
    board = dashboard()
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return found + [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]


def differences(ours: Any, theirs: Any, place: str = "") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            yield from differences(value, theirs.get(name), f"{place}/{name}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{place}/{number}")
    elif ours != theirs:
        yield place


def test_grafanas_schema_has_every_field() -> None:
    """The models of Grafana's own package, made from its schema, keep all of the dashboard."""
    pytest.importorskip("grafana_foundation_sdk", reason="not made for Python 3.10")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    board = dashboard()
    encoded = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    lost = set(differences(board, encoded))
    assert not {place for place in lost if place.rpartition("/options/")[2] not in NEWER}


def test_every_metric_and_label_exists() -> None:
    series: dict[str, set[str]] = {}
    for instrument in INSTRUMENTS:
        name = instrument.prometheus_name
        for suffix in ("_bucket", "_sum", "_count") if instrument.kind is Kind.HISTOGRAM else ("",):
            series[name + suffix] = {*instrument.labels, "instance", "le"}
    seen = set()
    for query in queries():
        for name, selector in re.findall(r"\b(outlast_\w+)(?:\{([^}]*)\})?", query):
            assert name in series, query
            seen.add(name)
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector):
                assert label in series[name], query
        for labels in re.findall(r"\bby \(([^)]*)\)", query):
            for label in labels.split(","):
                assert any(label.strip() in series[n] for n in series if n in query), query
    assert {"outlast_time_seconds_total", "outlast_recovery_seconds_bucket"} <= seen


def test_the_values_of_labels_exist() -> None:
    text = " ".join(queries())
    assert set(re.findall(r'phase="(\w+)"', text)) <= set(PHASE_FIELDS)
    assert set(re.findall(r'outlast_members\{[^}]*state="(\w+)"', text)) <= set(MEMBER_STATES)


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        grid = panel["gridPos"]
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                assert x < 24
                assert (x, y) not in cells
                cells.add((x, y))

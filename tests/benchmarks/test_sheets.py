"""Tables that benchmarks print, from made-up measurements."""

from __future__ import annotations

from typing import Any

from benchmarks.inprocess import restart


def test_the_peers_restart_is_compared_with_and_without_its_gloo_timeout() -> None:
    setting = "10 ms, gloo timeout 1 s"
    data: dict[str, Any] = {
        "ranks": 4,
        "ours": {"exception": {"restart": [0.025], "rejoin": [], "phases": {}}},
        "peer": {setting: {"exception": [1.4, 1.5, 1.6]}},
    }
    sheet = next(sheet for sheet in restart.sheets(data) if "Beside" in sheet.title)
    row = dict(zip(sheet.columns, sheet.rows[0], strict=True))
    assert (row["its setting"], row["ratio"]) == (setting, "60 x")
    assert row["without the gloo timeout"] == "20 x"  # (1.5 - 1) / 0.025

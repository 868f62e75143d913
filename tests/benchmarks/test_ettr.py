"""The projected ETTR: its formula, and the figures that it reads from the page of results."""

from __future__ import annotations

import math

import pytest
from benchmarks.lib.results_page import figure
from benchmarks.recovery.ettr import FAILURES, Costs, ettr, run, sheets


def test_the_formula() -> None:
    costs = Costs(restart=10.0, blocked=2.0, durable=5.0, replica=False)
    share, interval = ettr(costs, 2500.0)
    assert interval == 100.0  # sqrt(2 * 2 * 2500)
    assert math.isclose(share, (2500 * 100 / 102 - 50 - 5) / 2510)
    survives, _ = ettr(costs._replace(replica=True), 2500.0)
    assert math.isclose(survives, 2500 * 100 / 102 / 2510)
    assert ettr(costs._replace(durable=200.0), 2500.0)[1] == 200.0  # saves do not overlap
    assert ettr(costs, 10.0)[0] == 0.0  # no step is ever completed


def test_it_reads_all_its_figures_from_the_page() -> None:
    data = run(quick=True)
    by_size = {
        size: {row["system"]: row["ettr"] for row in data["rows"] if row["accelerators"] == size}
        for size in FAILURES
    }
    assert all(0.0 < share < 1.0 for rows in by_size.values() for share in rows.values())
    smaller, larger = by_size.values()
    assert all(larger[system] < share for system, share in smaller.items())
    projected, inputs = sheets(data)
    assert len(projected.rows) == len(data["rows"])
    assert len(inputs.rows) == len(data["measured"]) + len(data["assumed"])


PAGE = """## Section

### One
| what | n | ms | ms |
| --- | ---: | ---: | ---: |
| a | 4 | 1,234.5 | 2.50 (3.1) |
| a | 5 | - | 7 s |

### Two
| what | s |
| b | 1 |
"""


def test_a_figure_is_found_by_its_row_and_column() -> None:
    assert figure(PAGE, "One", "a", "ms") == 1234.5
    assert figure(PAGE, "One", "a", "ms", last=True) == 2.5
    assert figure(PAGE, "One", "a | 5", "ms", last=True) == 7.0
    assert figure(PAGE, "Section", "a", "n") == 4.0
    for table, row, column in [
        ("None", "a", "ms"),
        ("One", "b", "ms"),
        ("One", "a", "s"),
        ("One", "a | 5", "ms"),
    ]:
        with pytest.raises(LookupError, match=f"row '{row}'".replace("|", r"\|")):
            figure(PAGE, table, row, column)

"""Durations, ages and sizes as text."""

from __future__ import annotations

import pytest

from outlast.system.units import age_text, duration_text, size_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (0.0005, "500 µs"),
        (0.0123, "12.3 ms"),
        (4.56, "4.56 s"),
        (119.994, "119.99 s"),
        (200.0, "3 min 20 s"),
        (239.7, "4 min 0 s"),
        (7199.6, "2 h 0 min"),
        (18_720.0, "5 h 12 min"),
        (273_600.0, "3 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5.0, "0 s"),
        (59.9, "59 s"),
        (60.0, "1 min"),
        (7199.0, "119 min"),
        (7200.0, "2 h"),
        (172_799.0, "47 h"),
        (172_800.0, "2 d"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (111_600, "111.6 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (25_178_112, "25.2 MB"),
        (5 * 10**18, "5000.0 PB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text

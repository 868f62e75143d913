"""The drawings of the documentation can be read on a phone, to whose width they are shrunk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DRAWINGS = sorted((Path(__file__).parents[1] / "docs").glob("*.svg"))
PHONE, MARGINS = 390, 32


@pytest.mark.parametrize("file", DRAWINGS, ids=lambda file: file.name)
def test_the_smallest_text_of_a_drawing_is_ten_pixels_high_on_a_phone(file: Path) -> None:
    text = file.read_text()
    width = re.search(r"<svg [^>]*\bwidth=\"(\d+)\"", text)
    assert width is not None
    shrunk = min(1.0, (PHONE - MARGINS) / int(width[1]))
    sizes = [float(size) for size in re.findall(r"font-size=\"([\d.]+)\"", text)]
    assert min(sizes) * shrunk >= 10

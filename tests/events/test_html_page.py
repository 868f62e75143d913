"""The page of `outlast report --html`: complete, bounded, and safe with any text from logs."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import re
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from events.pages import Page, hostile_run, large_run
from events.synthetic_run import SyntheticRun
from events.test_goodput import run_with_redone_steps
from events.test_report_faults import run_without_a_host, stopped_run
from events.test_report_views import a_run, log
from outlast.events.event import Event
from outlast.events.report import build, render_html
from outlast.events.report.model import Span
from outlast.events.report.page import thin_marks, thin_spans
from outlast.events.report.report import Mark
from outlast.events.report.sentences import PARTS, cause_text, parts_of, share
from outlast.events.types import ReplicaMismatch, StragglerFound
from outlast.launch.cli import app


def rendered(events: list[Event]) -> Page:
    return Page(render_html(build(events), title="a run"))


def test_the_page_has_the_facts_of_the_report() -> None:
    report = build(a_run().events)
    page = rendered(a_run().events)
    assert report.goodput is not None
    for fact in (share(report.goodput), "500.0 ms", "connection closed by peer", "rank 3 on a"):
        assert fact in page.text
    for restart in report.restarts:
        assert cause_text(restart) in page.text
    labels = " ".join(element.get("aria-label", "") for _, element in page.elements)
    assert "first cause: killed by SIGKILL" in labels
    assert "rank 2: training" in labels


def test_the_title_is_the_script_with_its_arguments() -> None:
    page = rendered(a_run().events)
    assert page.text.strip().startswith("train.py --name 'a <b>' - outlast report")
    without = [event for event in a_run().events if event.kind != "launcher_started"]
    assert rendered(without).text.strip().startswith("a run - outlast report")


def test_the_faults_come_first_open_and_grouped() -> None:
    run = SyntheticRun(hosts=["a", "a"])
    run.begin(at=0.0)
    for number in range(1, 4):
        where, rank = f"bug.py:{16 if number < 3 else 40} in step", number % 2
        trace = f'  File "bug.py", line {number}, in step'
        run.fault(rank, at=10.0 * number, cause="KeyError: 'lr'", where=where, traceback=trace)
        run.restart(at=10.0 * number)
    run.complete(at=50.0)
    page = rendered(run.events)
    faults = page.text.index("Faults", page.text.index("The end"))
    lead = page.text.index("Completed after 3 restarts: 2 x KeyError at bug.py:16 (ranks 0, 1), ")
    told = page.text.index("(rank 1).", lead)
    first = page.text.index("2 x KeyError at bug.py:16", told)
    second = page.text.index("1 x KeyError at bug.py:40", told)
    goodput = page.text.index("Goodput is the share")
    assert faults < lead < goodput
    assert first < second < goodput
    groups = [element for element in page.named("details") if element.get("class") == "group"]
    assert [("open" in group) for group in groups] == [True, True]
    assert "line 1, in step" in page.text[first:second]


def test_faults_that_raise_no_error_are_marked() -> None:
    run = a_run()
    run.write(0, ReplicaMismatch(step=7, ranks=[2], hosts=["a"], majority=True), 12.0)
    slow = StragglerFound(
        step=9, straggler=1, straggler_host="a", seconds=0.5, typical_seconds=0.1, windows=3
    )
    run.write(0, slow, 13.0)
    labels = [element.get("aria-label", "") for _, element in rendered(run.events).elements]
    for said in ("replicas differ after step 7: ranks 2", "rank 1 on a is slow: 500.0 ms a step"):
        assert any(said in label for label in labels)


def test_the_parts_of_the_page_add_up_to_the_wall_time() -> None:
    for run in (run_with_redone_steps(), run_without_a_host(), a_run()):
        for host in build(run.events).hosts:
            assert sum(parts_of(host).values()) == pytest.approx(host.wall_seconds)


@pytest.mark.parametrize(
    "events",
    [[], stopped_run().events, SyntheticRun(hosts=["a"]).events, run_without_a_host().events],
    ids=["nothing", "stopped", "empty", "lost host"],
)
def test_every_run_has_a_page(events: list[Event]) -> None:
    page = rendered(events)
    sections = [element["id"] for element in page.named("section")]
    assert sections == ["faults", "goodput", "timeline", "recovery", "checkpoints", "end"]


def test_text_from_logs_is_never_markup() -> None:
    page = rendered(hostile_run().events)
    assert "<script>alert(1)</script>" in page.text
    assert len(page.named("script")) == 1
    assert page.named("img") == []
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)


def test_the_policy_allows_only_the_style_and_the_script_of_the_page() -> None:
    page = rendered(a_run().events)
    (policy,) = [m["content"] for m in page.named("meta") if "http-equiv" in m]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.raw[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    for _, attributes in page.elements:
        assert "style" not in attributes, "the policy forbids it"
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")


@pytest.mark.slow
def test_the_page_of_a_large_run_is_bounded() -> None:
    run = large_run()
    assert len(run.events) > 10_000
    text = render_html(build(run.events), title="a run")
    page = Page(text)
    assert len(text) < 1_500_000
    assert len(page.elements) < 8_000
    assert "The 100 longest of 300 faults" in page.text


def test_the_page_of_many_ranks_is_bounded() -> None:
    run = SyntheticRun(hosts=[f"host{number // 8}" for number in range(160)])
    run.begin(at=0.0)
    for number in range(1, 3):
        run.fault(159, at=number * 10.0)
        run.restart(at=number * 10.0)
    run.complete(at=100.0)
    page = rendered(run.events)
    assert len(page.elements) < 8_000
    assert "64 more lanes are not shown; those with faults come first." in page.text
    labels = [element.get("aria-label", "") for _, element in page.elements]
    assert any(label.startswith("rank 159: ") for label in labels)


def test_thinning_keeps_what_is_rare() -> None:
    spans = [Span(state="training", start=float(i), end=i + 0.9) for i in range(10_000)]
    spans[5000] = Span(state="lost", start=5000.0, end=5000.01)
    thin = thin_spans(spans, 100, 10_000.0)
    assert len(thin) <= 100
    assert sum(count for _, count in thin) == 10_000
    assert [count for span, count in thin if span.state == "lost"] == [1]
    seconds = sum(span.end - span.start for span, _ in thin)
    assert seconds == pytest.approx(sum(span.end - span.start for span in spans))
    marks = [Mark(kind="consequence", at=float(i), text="") for i in range(10_000)]
    marks[5000] = Mark(kind="fault", at=5000.0, text="the only one")
    few = thin_marks(marks, 50, 10_000.0)
    assert len(few) <= 51
    assert [mark.text for mark, _ in few if mark.kind == "fault"] == ["the only one"]
    assert sum(more + 1 for _, more in few) == 10_000


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    folder = log(a_run(), tmp_path)
    file = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(folder), "--html", str(file)])
    assert result.exit_code == 0, result.output
    assert result.output == f"wrote {file}\n"
    assert "first cause" in Page(file.read_text(encoding="utf-8")).text


def test_the_page_of_a_run_says_when_it_started(tmp_path: Path) -> None:
    (folder := tmp_path / "20261121-212345.123-nightly").mkdir()
    log(a_run(), folder)
    file = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--html", str(file)])
    assert result.exit_code == 0, result.output
    text = Page(file.read_text(encoding="utf-8")).text
    assert "nightly · started 2026-11-21 21:23:45 UTC" in text


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = log(a_run(), tmp_path)
    file = tmp_path / "missing" / "report.html"
    result = CliRunner().invoke(app, ["report", str(folder), "--html", str(file)])
    assert result.exit_code == 1
    assert result.stderr == (
        f"outlast: error: --html {file}: cannot be written: No such file or directory\n"
    )
    for option in ("--json", "--all"):
        result = CliRunner().invoke(app, ["report", str(folder), "--html", str(file), option])
        assert result.exit_code == 2, result.output


def test_all_text_has_enough_contrast() -> None:
    """At least 4.5 to 1 (WCAG 2.1, AA), in the light and in the dark design."""
    style = files("outlast.events.report").joinpath("style.css").read_text(encoding="utf-8")
    for design in style.split("@media (prefers-color-scheme: dark)"):
        colors = dict(re.findall(r"--(ink|dim|link|bg|card): #([0-9a-f]{6})", design))
        for text in ("ink", "dim", "link"):
            for ground in ("bg", "card"):
                one, other = sorted(map(_luminance, (colors[text], colors[ground])))
                assert (other + 0.05) / (one + 0.05) >= 4.5, (text, ground)


def test_the_colors_of_the_charts_differ_for_every_kind_of_color_vision() -> None:
    style = files("outlast.events.report").joinpath("style.css").read_text(encoding="utf-8")
    roles = {
        name: color
        for names, color in re.findall(
            r"^((?:\.c-\w+, )*\.c-\w+) \{ --c: var\(--(\w+)\)", style, re.M
        )
        for name in re.findall(r"\.c-(\w+)", names)
    }
    page = files("outlast.events.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    charts: list[list[str]] = [list(PARTS)]
    for names in re.findall(r"set (?:phases|states) = {([^}]*)}", page):
        charts.append(re.findall(r'"(\w+)":', names))
    assert len(charts) == 3
    designs = style.split("@media (prefers-color-scheme: dark)")[:2]
    for design in designs:
        palette = dict(re.findall(r"--(\w+): #([0-9a-f]{6})", design))
        for chart in charts:
            for one, other in itertools.combinations(chart, 2):
                pair = palette[roles[one]], palette[roles[other]]
                for vision, matrix in VISIONS.items():
                    a, b = (_lab(matrix, color) for color in pair)
                    assert math.dist(a, b) >= 20, (vision, one, other)


VISIONS = {  # Machado, Oliveira and Fernandes (2009), severity 1
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def _lab(vision: tuple[tuple[float, ...], ...], color: str) -> tuple[float, float, float]:
    """The color as it is seen, in CIELAB, where equal distances look equally different."""
    seen = [sum(p * q for p, q in zip(row, _linear(color), strict=True)) for row in vision]
    seen = [min(max(part, 0.0), 1.0) for part in seen]
    to_xyz = ((0.4339, 0.3762, 0.1899), (0.2127, 0.7152, 0.0722), (0.0178, 0.1095, 0.8727))
    x, y, z = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116
        for part in (sum(p * q for p, q in zip(row, seen, strict=True)) for row in to_xyz)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _linear(color: str) -> list[float]:
    parts = (int(color[place : place + 2], 16) / 255 for place in (0, 2, 4))
    return [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def _luminance(color: str) -> float:
    return sum(p * q for p, q in zip(_linear(color), (0.2126, 0.7152, 0.0722), strict=True))

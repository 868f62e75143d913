"""The page of `outlast report --html`: complete, bounded, and safe with any text from logs."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from events.pages import Page, hostile_run, large_run
from events.synthetic_run import SyntheticRun
from events.test_goodput import run_with_redone_steps
from events.test_report_hosts import run_without_a_host
from events.test_report_render import a_run, log
from events.test_report_stops import stopped_run
from outlast.events import Event, ReplicaMismatch, StragglerFound
from outlast.events.report import build, render_html
from outlast.events.report.html.overview import parts_of
from outlast.events.report.html.thinning import thin_marks, thin_spans
from outlast.events.report.model import Mark, Span
from outlast.events.report.sentences import cause_text
from outlast.events.report.words import share
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
    titles = [element["id"] for element in page.named("section")]
    assert titles == [
        *("goodput", "timeline", "recovery", "restarts", "causes", "checkpoints", "end"),
    ]


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
    assert "The 100 longest of 300 restarts" in page.text


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
    assert sum(each.count for each in thin) == 10_000
    (lost,) = [each for each in thin if each.span.state == "lost"]
    assert lost.count == 1
    seconds = sum(each.span.end - each.span.start for each in thin)
    assert seconds == pytest.approx(sum(span.end - span.start for span in spans))
    marks = [Mark(kind="consequence", at=float(i), text="") for i in range(10_000)]
    marks[5000] = Mark(kind="fault", at=5000.0, text="the only one")
    few = thin_marks(marks, 50, 10_000.0)
    assert len(few) <= 51
    assert [each.mark.text for each in few if each.mark.kind == "fault"] == ["the only one"]
    assert sum(each.more + 1 for each in few) == 10_000


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
    assert "nightlystarted 2026-11-21 21:23:45 UTC" in text


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
    style = files("outlast.events.report.html").joinpath("style.css").read_text(encoding="utf-8")
    for design in style.split("@media (prefers-color-scheme: dark)"):
        colors = dict(re.findall(r"--(ink|dim|link|bg|card): #([0-9a-f]{6})", design))
        for text in ("ink", "dim", "link"):
            for ground in ("bg", "card"):
                one, other = sorted(map(_luminance, (colors[text], colors[ground])))
                assert (other + 0.05) / (one + 0.05) >= 4.5, (text, ground)


def _luminance(color: str) -> float:
    parts = (int(color[place : place + 2], 16) / 255 for place in (0, 2, 4))
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(p * share for p, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

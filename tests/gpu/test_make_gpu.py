"""`make gpu` without a GPU says so and writes nothing; the page says what a run found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import runs
from benchmarks.gpu.plan import MEASURED_S, ONE_GPU, ONE_GPU_S, SEVERAL_GPUS, Part
from benchmarks.gpu.results import Figure, Outcome, Results

ROOT = Path(__file__).parents[2]
MACHINE = {"GPUs": "1: a stand-in"}
PASSED = Outcome("test_nccl: test_one", "passed", 1.5)
COPY = Figure("blocked by a save", "s", 0.3, 0.2, "one copy to pinned memory")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_no_figures(tmp_path: Path) -> None:
    for name in ("results.json", "results.md"):
        (tmp_path / name).write_text("of an earlier run")
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("make gpu: no CUDA device: torch ")
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_the_dependencies_is_told_which(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "benchmarks" / "gpu" / "__main__.py")]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "lacks torch, psutil, typer, rich, xxhash, pytest, pytest-timeout" in done.stderr
    assert "WHEELS=DIR" in done.stderr


def test_the_page_and_the_json_say_the_same(tmp_path: Path) -> None:
    results = Results(MACHINE, [PASSED], [COPY, Figure("alone", "s", 0.1)], 12.3)
    results.write(tmp_path)
    facts = json.loads((tmp_path / "results.json").read_text())
    assert facts["passed"] is True
    assert [figure["ratio"] for figure in facts["figures"]] == [pytest.approx(1.5), None]
    page = (tmp_path / "results.md").read_text()
    assert "1 passed, 0 failed, 0 skipped; 12 s." in page
    assert "| blocked by a save | 0.3 s | 0.2 s | 1.50 | one copy to pinned memory |" in page
    assert "| alone | 0.1 s | - | - | - |" in page
    assert "- GPUs: 1: a stand-in" in page


@pytest.mark.parametrize(
    "results",
    [
        Results(MACHINE, [], [COPY], 1.0),
        Results(MACHINE, [PASSED, Outcome("b", "failed", 1.0, "why")], [COPY], 1.0),
        Results(MACHINE, [PASSED], [Figure("x", "s", None, error="exit code 1")], 1.0),
    ],
)
def test_a_run_that_is_not_whole_has_not_passed(results: Results) -> None:
    assert not results.passed
    assert not json.loads(results.to_json())["passed"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_measurement_that_fails_gives_its_error_and_no_figure() -> None:
    (figure,) = runs.run_measurement("restart_with_nccl", 60.0)
    assert figure.value is None
    assert figure.ratio is None
    assert figure.error.startswith("exit code ")
    (late,) = runs.run_measurement("restart_with_nccl", 0.0)
    assert late.error == "it ran out of time"


@pytest.mark.slow
def test_a_test_that_hangs_ends_with_its_part(tmp_path: Path) -> None:
    script = tmp_path / "test_two.py"
    script.write_text(
        "import pytest, time\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_a(): pass\n"
        "def test_b(): time.sleep(600)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    tests = (f"-c{tmp_path}/pytest.ini", str(script))
    parts = [Part("hangs", 20.0, tests), Part("comes too late", 20.0, tests)]
    found = runs.run_parts(parts, tmp_path, time.monotonic() + 20.0)
    assert [(each.name, each.outcome) for each in found] == [
        ("test_two: test_a", "passed"),
        ("hangs", "failed"),
        ("comes too late", "failed"),
    ]
    assert [each.reason for each in found[1:]] == ["it took more than 20 s", "no time was left"]


@pytest.mark.slow
def test_the_plan_has_every_test_on_a_gpu_once_and_fits_its_time() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "tests/gpu"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    collected = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    planned = [test for part in (*ONE_GPU, *SEVERAL_GPUS) for test in part.tests]
    for test in collected:
        matching = [each for each in planned if each in (test, test.partition("::")[0])]
        assert matching, test
    assert all(any(each.startswith(test) for each in collected) for test in planned)
    assert len(set(planned)) == len(planned)
    assert MEASURED_S < ONE_GPU_S <= 540


@pytest.mark.slow
def test_the_outcomes_of_tests_are_read(tmp_path: Path) -> None:
    script = tmp_path / "test_three.py"
    script.write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_a(): pass\n"
        "def test_b(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='two GPUs')\n"
        "def test_c(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    found, stopped = runs.run_tests(
        tmp_path / "r.xml", 100.0, f"-c{tmp_path}/pytest.ini", str(script)
    )
    assert not stopped
    assert [test.outcome for test in found] == ["passed", "failed", "skipped"]
    assert found[1].reason == "assert 1 == 2"
    assert found[2].reason == "two GPUs"

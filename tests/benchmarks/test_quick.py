"""Quick runs of the benchmarks from the command line, and the page with their results."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]


def quick(tmp_path: Path, name: str, limit_s: float) -> tuple[Any, str]:
    """What a quick run of one benchmark has measured, and what it printed."""
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, timeout=limit_s, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())[name]
    assert result["quick"]
    assert "torch" in result["machine"]
    return result["data"], done.stdout


def test_scale_counts_a_constant_number_of_operations(tmp_path: Path) -> None:
    data, _ = quick(tmp_path, "scale", 120)
    small, large = data["4"], data["16"]
    for what in ("barrier", "view change"):
        assert large[what]["operations"] < 1.3 * small[what]["operations"]


def test_many_tensors_are_in_few_files(tmp_path: Path) -> None:
    (found,) = quick(tmp_path, "many-tensors", 170)[0].values()
    assert (found["tensors"], found["files"]) == (160, 3)
    assert all(
        value > 0 for times in found.values() if isinstance(times, list) for value in times[:2]
    )


def test_replacement_measures_standbys_and_new_processes(tmp_path: Path) -> None:
    data, _ = quick(tmp_path, "replacement", 170)
    assert [len(data[kind]) for kind in ("standby", "new")] == [2, 2]
    assert all(taken > 0 for taken in data["standby"] + data["new"])


def test_the_load_of_the_store_grows_with_hosts_and_not_with_ranks(tmp_path: Path) -> None:
    data, _ = quick(tmp_path, "hosts", 120)
    found = {(one["hosts"], one["how"]): one for one in data["simulated"]}
    alone, few, many = (
        found[16, "each rank by itself"],
        found[4, "combined"],
        found[16, "combined"],
    )
    # Read leases cost a message of each host and little time: one round of small messages.
    leased = found[16, "combined, read leases"]
    assert leased["messages"] == many["messages"] + 16
    assert many["messages"] < alone["messages"] / 4
    assert many["messages"] / 16 < 1.3 * few["messages"] / 4
    # Nothing that all ranks read grows with their number: 16 bytes for each are far less.
    assert many["sent_bytes"] / 16 < few["sent_bytes"] / 4 + 16 * 12 * 8
    one, several = data["real"]
    assert several["operations"] < 8 * one["operations"]


def test_a_move_is_measured_beside_a_death_a_stop_and_torchrun(tmp_path: Path) -> None:
    data, printed = quick(tmp_path, "moves", 500)
    (found,) = data["sizes"].values()
    (move,) = found["move"]
    assert sum(move["parts"].values()) == pytest.approx(move["pause"])
    assert [found[way][0]["again"] for way in ("move", "stop")] == [0, 0]
    assert all(found[way][0]["again"] for way in ("death", "torchrun"))
    assert "1.0 x" in printed


def test_recovery_runs_each_system_through_the_same_faults(tmp_path: Path) -> None:
    data, printed = quick(tmp_path, "recovery", 400)
    systems = data["systems"]
    for name in ("outlast", "torchrun, torch.save", "torchrun, DCP async_save"):
        found = systems[name]["5"]
        assert found["error"] == ""
        assert found["steps"] > 0
        assert found["reached"] is None or 0 < found["reached"] <= 12.0
        assert len(found["faults"]) + found["missed"] == 2
    assert systems["outlast"]["5"]["faults"][0]["useful"] is not None
    for name in ("nvidia-resiliency-ext", "torchrun, lm-resiliency", "torchft"):  # not installed
        missing = systems[name].get("missing")
        assert f"{missing} is not installed" in printed if missing else "5" in systems[name]


def test_each_system_makes_its_steps_through_the_faults_of_a_seed(tmp_path: Path) -> None:
    data, printed = quick(tmp_path, "steps-under-failures", 500)
    jobs = {each["system"]: each for each in data["jobs"]}
    assert jobs.keys() >= {"outlast", "torchrun, torch.save", "torchrun, DCP async_save"}
    assert [each["error"] for each in jobs.values()] == [""] * len(jobs)
    mine = jobs["outlast"]
    assert mine["reached"] == sorted(mine["reached"])
    assert mine["faults"]
    assert mine["again"] == 0
    assert "no faults, no saves" in printed


def test_a_contender_that_fails_is_in_the_table_and_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import sys, psutil; from benchmarks.recovery import contenders, figures, job;"
        "fails = contenders.Contender('broken', 'torch', lambda:"
        " [([sys.executable, '-c', 'import sys; sys.exit(\"no such luck\")'], {}),"
        "  ([sys.executable, '-c', 'import time; time.sleep(1000)'], {})]);"
        "found = figures.figures(job.run_job(fails, [], 5.0), 3, 5.0, 0.01);"
        "data = {'intervals': ['5'], 'durations': [5.0], 'plain_step': 0.01,"
        " 'systems': {'broken': {'5': found}, 'other': {'missing': 'pkg'}}};"
        "[print(row) for sheet in figures.sheets(data) for row in sheet.rows];"
        "assert not psutil.Process().children(recursive=True)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "('broken', '0 (3)'" in done.stdout
    assert "0.0%, failed" in done.stdout
    assert "no such luck" in done.stdout
    assert "pkg is not installed" in done.stdout


def test_a_benchmark_that_is_told_to_stop_ends_what_it_has_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "recovery", "--quick"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "results.json")], cwd=ROOT, stdout=subprocess.PIPE
    ) as benchmark:
        started = psutil.Process(benchmark.pid)
        while len(found := started.children(recursive=True)) < 3:  # a launcher and its ranks
            assert benchmark.poll() is None
            time.sleep(0.1)
        benchmark.terminate()
        assert benchmark.wait(170) == 128 + signal.SIGTERM
    assert not [process for process in found if process.is_running()]


def test_rollback_restores_each_way_and_redoes_only_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    data, printed = quick(tmp_path, "rollback", 500)
    for ways in data["faults"].values():
        for way, faults in ways.items():
            assert [each["kind"] for each in faults] == ["exception", "sigkill"]
            assert [each["redone"] for each in faults] == ([0, 0] if way == "live" else [3, 3])
            assert all(0 < each["restore"] < each["first_step"] for each in faults)
        alone, killed = ways["live"]
        assert alone["moved_bytes"] == 0
        assert killed["moved_bytes"] >= killed["size_bytes"]
    assert set(data["cost"]) == {"10 tensors"}
    assert "After a SIGKILL" in printed


def test_useful_step_has_each_part_of_each_kind_of_fault(tmp_path: Path) -> None:
    rows = quick(tmp_path, "useful-step", 500)[0]["rows"]
    assert [row["kind"] for row in rows] == ["exception", "sigkill", "hang"]
    for fault in (fault for row in rows for fault in row["faults"]):
        assert sum(fault["parts"].values()) == pytest.approx(fault["total"])
        assert fault["parts"]["first step"] > 0


def test_silent_compares_whole_cycles(tmp_path: Path) -> None:
    data, _ = quick(tmp_path, "silent", 400)
    assert len(data["plain"]) == len(data["checked"]) == 2
    assert data["alarms"] == []


def test_checkpoint_measures_every_way_and_source(tmp_path: Path) -> None:
    data, printed = quick(tmp_path, "checkpoint", 300)
    for part in ("one", "ranks"):
        assert data[part]["sources"] == ["memory"] * 2 + ["storage"] * 4
        timed = data[part]["seconds"]
        for way in ("ours, eager", "ours, overlapped", "torch.save", "dcp.async_save", "fork"):
            (blocked,), (durable,) = timed[way]["blocked"], timed[way]["durable"]
            assert 0 < blocked <= durable
    descriptors = [sample[1] for sample in data["flat"]["writer"][1:]]
    assert max(descriptors) == min(descriptors)
    assert "Goals" in printed


def test_slowdown_compares_each_interval_with_the_best_other_way(tmp_path: Path) -> None:
    rates = quick(tmp_path, "slowdown", 300)[0]["rates"]
    assert set(rates) == {"1", "10"}
    for found in rates.values():
        for way in ("ours, overlapped", "ours, eager", "torch.save", "async_save, cached stager"):
            ((saving, without),) = found[way]
            assert saving > 0
            assert without > 0
    script = (
        "from benchmarks.checkpoint.slowdown import sheets;"
        "at = lambda ours, eager, other: {'ours, overlapped': [[1 / ours, 1.0]],"
        " 'ours, eager': [[1 / eager, 1.0]], 'torch.save': [[1 / other, 1.0]]};"
        "rates = {'1': at(1.2, 1.4, 1.6), '10': at(1.02, 1.06, 1.1), '100': at(2.0, 1.0, 1.001)};"
        "print([row[-1] for row in sheets({'rates': rates, 'size_bytes': 1})[0].rows])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.strip() == "['yes', 'no: every 1, 10', '-']", done.stderr


def test_copies_measure_each_way_back_from_the_loss_of_a_host(tmp_path: Path) -> None:
    data, printed = quick(tmp_path, "copies", 300)
    assert set(data["rate"]["rates"]) == {"without saves", "saves", "saves with copies"}
    assert set(data["loss"]) == {"copies", "storage", "torchrun"}
    assert all(len(found["seconds"]) == 1 for found in data["loss"].values())
    assert "torchrun, from storage" in printed


def test_elastic_finds_bit_identical_weights_at_any_size(tmp_path: Path) -> None:
    data, printed = quick(tmp_path, "elastic", 300)
    assert data["position"]["grown_bytes"] < 1 << 20
    assert data["position"]["stored_bytes"] > 1 << 20
    registry = data["registry"]["seconds"]
    (blocked,), (durable,) = (
        registry[f"save_all_states, asynchronous{until}"] for until in ("", ", durable")
    )
    assert 0 < blocked <= durable
    for way in ("save_all_states", "load_all_states", "torch.save, durable", "torch.load"):
        assert len(registry[way]) == 1
    for each in data["resharding"]:
        assert all(len(values) == 1 for values in each["seconds"].values())
    runs = data["consistent"]["runs"]
    (weights,) = {tuple(run["weights"]["ConsistentDDP, 4 parts"]) for run in runs}
    assert len(weights) == 1
    assert "x DDP in as many parts" in printed
    assert "The registry of states" in printed


def test_the_page_is_updated_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(
        "before\n<!-- figures: begin -->\n\n## Scale\n\nold\n\n## Hangs\n\n"
        "### Kept\n\n- as it was\n\n"
        "<!-- figures: end -->\nafter\n"
    )
    numbers = {"seconds": [0.001], "operations": 6.0, "most": 7.0, "bytes": 1024.0}
    data = {"4": {"barrier": numbers, "view change": numbers}}
    results = {"scale": {"quick": False, "machine": {"torch": "2.13"}, "data": data}}
    script = (
        "import json, sys; from pathlib import Path; from benchmarks.lib.pages import write_docs;"
        "write_docs(Path(sys.argv[1]), json.loads(sys.argv[2]))"
    )
    command = [sys.executable, "-c", script, str(page), json.dumps(results)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=170, capture_output=True)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "\n## Hangs\n\n### Kept\n\n- as it was\n\n## Scale\n" in text
    assert "| barrier | 4 | 1.0 |" in text


def test_limits_measure_two_checkouts(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", "limits", "--quick", "--beside", str(ROOT)]
    command += ["--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, timeout=170, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["limits"]["data"]["found"]
    assert found["now"].keys() == found["before"].keys()
    assert "overlapped save, 1 rank: blocked, by a copy" in done.stdout

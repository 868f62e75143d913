"""`outlast checkpoint export`: of every kind of content, and of damaged checkpoints."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

from async_checkpoint.checkpoints import folder_of, same, save_steps, state_of
from launch.checkpoint_command import (
    DTYPES,
    error,
    every_kind,
    outlast,
    read_safetensors,
    save,
)
from outlast.async_checkpoint.restore import verified_read, whole_tensors
from outlast.chaos.storage import flip_byte

TENSORS = "__0_0.distcp"


def test_every_kind_of_tensor_as_safetensors(tmp_path: Path) -> None:
    state = every_kind()
    save(tmp_path / "c", state)
    file = tmp_path / "all.safetensors"
    done = outlast("export", tmp_path / "c", "-o", file)
    assert done.exit_code == 0, done.output
    found, metadata = read_safetensors(file)
    expected = {
        **{f"model.{name}": tensor for name, tensor in state["model"].items()},
        **{f"kinds.{name}": tensor for name, tensor in state["kinds"].items()},
        **{f"few.{index}": tensor for index, tensor in enumerate(state["few"])},
        "numbered.0": state["numbered"][0],
    }
    assert same(found, expected)
    assert metadata == {"format": "pt", "step": "1"}
    assert f"step 1: {len(expected)} tensors, " in done.stdout
    assert "left out numbered.7.step, steps, path, sparse: safetensors has only" in done.stderr


def test_the_package_safetensors_reads_it(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="needs the package safetensors")
    state = every_kind()
    save(tmp_path / "c", state)
    assert outlast("export", tmp_path / "c", "-o", tmp_path / "x.safetensors").exit_code == 0
    found = package.load_file(tmp_path / "x.safetensors")
    assert same(found, read_safetensors(tmp_path / "x.safetensors")[0])
    assert len(found) == len(state["model"]) + len(DTYPES) + 4


# Torch's own load of the exported file says so, since 2.15.
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_every_kind_of_tensor_and_value_as_a_state_dict(tmp_path: Path) -> None:
    state = every_kind()
    save(tmp_path / "c", state)
    done = outlast("export", tmp_path / "c", "-o", tmp_path / "all.pt")
    assert (done.exit_code, done.stderr) == (0, "")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found.pop("sparse").to_dense(), state.pop("sparse").to_dense())
    assert found.pop("path")["__outlast__"] == "path"
    del state["path"]
    assert same(found, state)
    assert list(found) == list(state)
    assert list(found["model"]) == list(state["model"])


class Own:
    def __init__(self) -> None:
        self.a = 1


def test_a_value_of_the_programs_own_class_is_left_out_and_named(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Own]):
        save(tmp_path / "c", {"w": torch.ones(2), "own": Own()})
    done = outlast("export", tmp_path / "c", "-o", tmp_path / "all.pt")
    assert done.exit_code == 0
    assert "outlast: warning: left out own: torch.load with weights_only=True would" in done.stderr
    assert same(torch.load(tmp_path / "all.pt", weights_only=True), {"w": torch.ones(2)})


def test_what_a_format_does_not_have_is_an_error(tmp_path: Path) -> None:
    state = {"wide": torch.ones(2, dtype=torch.complex128), "w": torch.ones(2)}
    save(tmp_path / "c", state, {"__metadata__": torch.ones(2)})
    file = tmp_path / "x.safetensors"
    message = error(outlast("export", tmp_path / "c", "--step", 1, "-o", file))
    assert "'wide': safetensors does not have the dtype complex128; use --format torch" in message
    message = error(outlast("export", tmp_path / "c", "-o", file))
    assert "'__metadata__': safetensors does not have a tensor of this name" in message
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert outlast("export", tmp_path / "c", "--step", 1, "-o", file, "w").exit_code == 0
    done = outlast("export", tmp_path / "c", "--step", 1, "-o", file, "--format", "torch")
    assert f"{file} exists; use --force" in error(done)
    done = outlast("export", tmp_path / "c", "--step", 1, "-o", file, "--format=torch", "--force")
    assert done.exit_code == 0
    file.rename(tmp_path / "x.pt")  # torch reads files by their names
    assert same(torch.load(tmp_path / "x.pt", weights_only=True), state)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["model.weight"], ["model.weight"]),
        (["model"], ["model.bias", "model.weight"]),
        (["*ight"], ["model.weight"]),
        (["model.b*", "model.weight"], ["model.bias", "model.weight"]),
        (["--root", "model"], ["bias", "weight"]),
        (["--root", "model", "bias"], ["bias"]),
    ],
)
def test_a_part_of_the_tree(tmp_path: Path, arguments: list[str], names: list[str]) -> None:
    save_steps(tmp_path / "c", 1)
    file = tmp_path / "x.safetensors"
    assert outlast("export", tmp_path / "c", "-o", file, *arguments).exit_code == 0
    model = state_of(1)["model"]
    found, _ = read_safetensors(file)
    assert same(found, {name: model[name.removeprefix("model.")] for name in names})


def test_a_root_of_a_nested_dict_and_of_a_list(tmp_path: Path) -> None:
    state = {"parts": [{"w": torch.ones(2), "n": 1}, {"w": torch.zeros(2), "n": 2}]}
    save(tmp_path / "c", state)
    for root, expected in (("parts", state["parts"]), ("parts.1", state["parts"][1])):
        done = outlast("export", tmp_path / "c", "-o", tmp_path / "x.pt", "--root", root, "--force")
        assert done.exit_code == 0, done.output
        assert same(torch.load(tmp_path / "x.pt", weights_only=True), expected)


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    save_steps(tmp_path / "c", 1)

    def message(*arguments: str) -> str:
        return error(outlast("export", tmp_path / "c", "-o", tmp_path / "x.pt", *arguments))

    assert "has no 'model.wait'; similar: model.weight" in message("model.weight", "model.wait")
    assert "has no 'zzz'; similar: none\n" in message("zzz")
    assert "has nothing under 'mod'; it has model, note, steps" in message("--root", "mod")
    assert "no tensor is selected, only steps" in message("steps")
    assert not (tmp_path / "x.pt").exists()


def test_the_newest_valid_one_or_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_steps(tmp_path / "c", 1, 2, 3, 4)
    (folder_of(tmp_path / "c", 4) / TENSORS).write_bytes(b"short")
    flip_byte(folder_of(tmp_path / "c", 3) / TENSORS, 100)
    done = outlast("export", "c")
    assert done.exit_code == 0
    first, second, third = done.stderr.splitlines()
    assert first.startswith(f"outlast: warning: passed over step 4: {TENSORS}: 5 bytes instead of")
    assert second.startswith(f"outlast: warning: passed over step 3: {tmp_path}/c/step-00000003/")
    assert "is damaged between bytes 0 and" in second
    assert "left out steps, note" in third
    found, metadata = read_safetensors(tmp_path / "step-2.safetensors")
    assert same({"weight": found["model.weight"]}, {"weight": state_of(2)["model"]["weight"]})
    assert metadata["step"] == "2"
    assert outlast("export", "c", "--format", "torch", "--step", 1).exit_code == 0
    assert same(torch.load("step-1.pt", weights_only=True), state_of(1))
    assert "damaged between bytes" in error(outlast("export", "c", "--step", 3))
    assert "5 bytes instead of" in error(outlast("export", "c", "--step", 4))
    assert "no checkpoint of step 5; it has [1, 2, 3, 4]" in error(
        outlast("export", "c", "--step", 5)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("c", "step-1.pt", "step-2.safetensors")
    ]
    for step in (1, 2):
        flip_byte(folder_of(tmp_path / "c", step) / TENSORS, 100)
    assert f"no checkpoint in {tmp_path}/c is valid" in error(outlast("export", "c", "-o", "x.pt"))


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    assert "has no checkpoints" in error(outlast("export", tmp_path, "-o", tmp_path / "x.pt"))
    assert "is not a folder" in error(outlast("export", tmp_path / "no"))
    assert "is not a folder" in error(outlast("diff", tmp_path / "no", tmp_path), code=2)
    (tmp_path / "train.py").touch()
    assert "holds no checkpoints, but train.py" in error(outlast("export", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_full_disk_leaves_the_old_file_alone(tmp_path: Path, name: str) -> None:
    """A limit of the file size stands for it."""
    save_steps(tmp_path / "c", 1)
    (tmp_path / name).write_bytes(b"before")

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    command = [sys.executable, "-m", "outlast.launch", "checkpoint", "export", "c", "-o", name]
    done = subprocess.run(
        [*command, "--force"],
        cwd=tmp_path,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("outlast: error: "), done.stderr
    assert (tmp_path / name).read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", name]


def test_one_batch_of_tensors_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": [torch.full((100_000,), float(number)) for number in range(100)]}
    save(tmp_path / "c", state)
    monkeypatch.setattr(whole_tensors, "_BATCH_BYTES", 2_000_000)
    monkeypatch.setattr(verified_read.os, "cpu_count", lambda: 1)
    tracemalloc.start()
    try:
        done = outlast("export", tmp_path / "c", "-o", tmp_path / "x.safetensors")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert done.exit_code == 0
    found, _ = read_safetensors(tmp_path / "x.safetensors")
    assert all(torch.equal(found[f"w.{number}"], state["w"][number]) for number in range(100))
    assert peak_bytes < 10_000_000, "of 40 MB, a batch of 2 MB and a chunk of 4 MiB"


def test_safetensors_and_equal_checkpoints_need_no_torch(tmp_path: Path) -> None:
    save_steps(tmp_path / "c", 1, 2)
    program = """
import sys
from outlast.launch.cli import app
app(["checkpoint", "export", "c"], standalone_mode=False)
app(["checkpoint", "diff", "c", "c"], standalone_mode=False)
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "step-2.safetensors").exists()

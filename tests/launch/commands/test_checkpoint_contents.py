"""`outlast checkpoint export` and `diff`: of every kind of content, and of damaged checkpoints."""

from __future__ import annotations

import copy
import json
import math
import re
import resource
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from async_checkpoint import made
from async_checkpoint.checkpoints import NET, folder_of, same, save_steps, state_of
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.restore import verified_read, whole_tensors
from outlast.async_checkpoint.storage.entries import Shard, TensorEntry
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.chaos.storage import flip_byte
from outlast.launch.cli import app

TENSORS = "__0_0.distcp"
# By the format's description: https://huggingface.co/docs/safetensors
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool},
    "C64": torch.complex64,
}


def outlast(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def error(result: Result, code: int = 1) -> str:
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return str(result.stderr)


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A reader of the format, which checks that the data has no holes and is aligned."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    found, ends = {}, {0}
    data = bytearray(content[8 + length :])
    for name, entry in sorted(header.items(), key=lambda one: one[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        assert begin in ends
        assert begin % dtype.itemsize == 0
        assert end - begin == math.prod(entry["shape"]) * dtype.itemsize
        ends.add(end)
        tensor = torch.frombuffer(data[begin:end] or bytearray(8), dtype=dtype)
        found[name] = tensor[: math.prod(entry["shape"])].reshape(entry["shape"])
    assert max(ends) == len(data)
    return found, metadata


def every_kind() -> dict[str, Any]:
    torch.manual_seed(1)
    bits = torch.randint(-100, 100, (6, 4))
    weight = torch.randn(300, 5)
    kinds = {str(dtype)[6:]: bits.to(dtype) for dtype in DTYPES.values()}
    kinds["bool"] = bits > 0
    return {
        "model": {"a.weight": weight, "tied": weight, "cut": weight[:, 1:3], "turned": weight.t()},
        "kinds": kinds,
        "few": [torch.tensor(3.5), torch.empty(0, 3), torch.tensor([math.nan, -0.0, math.inf])],
        "numbered": {0: torch.arange(3), 7: {"step": 2}},
        "steps": 5,
        "path": Path("/data"),
        "sparse": torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True),
    }


def save(path: Path, *states: dict[str, Any]) -> None:
    """Saves steps 1, 2, ..."""
    with Checkpointer(path) as checkpointer:
        for step, state in enumerate(states, 1):
            checkpointer.save(step, state).wait(NET)


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
    said = error(outlast("export", tmp_path / "c", "--step", 1, "-o", file))
    assert "'wide': safetensors does not have the dtype complex128; use --format torch" in said
    said = error(outlast("export", tmp_path / "c", "-o", file))
    assert "'__metadata__': safetensors does not have a tensor of this name" in said
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

    def said(*arguments: str) -> str:
        return error(outlast("export", tmp_path / "c", "-o", tmp_path / "x.pt", *arguments))

    assert "has no 'model.wait'; similar: model.weight" in said("model.weight", "model.wait")
    assert "has no 'zzz'; similar: none\n" in said("zzz")
    assert "has nothing under 'mod'; it has model, note, steps" in said("--root", "mod")
    assert "no tensor is selected, only steps" in said("steps")
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


def difference(path: Path, *arguments: object) -> dict[str, Any]:
    done = outlast("diff", path, path, "--json", *(arguments or ("--step-a", 1, "--step-b", 2)))
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == int(found["different"])
    return found


def changed(path: Path, one: torch.Tensor, index: Any, value: Any) -> dict[str, Any]:
    """The difference that one changed element makes."""
    other = one.clone()
    other[index] = value
    save(path, {"w": one}, {"w": other})
    (found,) = difference(path)["tensors"]
    assert found["name"] == "w"
    assert found["differing"] == 1
    assert found["elements"] == one.numel()
    return dict(found)


def test_equal_ones(tmp_path: Path) -> None:
    state = every_kind()
    save(tmp_path, state, copy.deepcopy(state))
    done = outlast("diff", tmp_path, tmp_path, "--step-a", 1)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"equal: {len(DTYPES) + 12}\n"
    assert difference(tmp_path)["equal"] == len(DTYPES) + 12


def test_how_much_a_tensor_differs(tmp_path: Path) -> None:
    one = torch.zeros(300, 5)
    other = one.clone()
    other[7, 3], other[9, 0], other[299, 4] = 0.5, -4, -0.0
    save(tmp_path, {"w": one, "same": one}, {"w": other, "same": one})
    found = difference(tmp_path)
    assert found["tensors"] == [
        {
            "name": "w",
            "dtype": "float32",
            "shape": [300, 5],
            "elements": 1500,
            "differing": 3,
            "first": [7, 3],
            "max_abs": 4.0,
            "max_rel": 1.0,
            "non_finite": 0,
        }
    ]
    assert found["equal"] == 1
    done = outlast("diff", tmp_path, tmp_path, "--step-a", 1)
    assert done.exit_code == 1
    title, row, last = done.stdout.splitlines()
    assert re.split("  +", title) == [
        *("tensor", "differ", "of", "first at", "max abs", "max rel", "not finite")
    ]
    assert row.split() == ["w", "3", "1500", "[7,", "3]", "4", "1", "-"]
    assert last == "different tensors: 1, equal: 1"


def test_numbers_are_compared_exactly_and_not_a_number_bit_by_bit(tmp_path: Path) -> None:
    large = torch.tensor([0, 2**63 - 1, -(2**63)])
    assert changed(tmp_path / "a", large, 1, 2**63 - 2)["max_abs"] == 1
    assert changed(tmp_path / "b", large, 1, -(2**63))["max_abs"] == 2**64 - 1
    nan = torch.tensor([math.nan, 1.0, math.inf])
    found = changed(tmp_path / "c", nan, 1, math.nan)
    assert (found["first"], found["max_abs"], found["non_finite"]) == ([1], None, 1)
    found = changed(tmp_path / "d", nan, 2, 1.0)
    assert (found["first"], found["max_abs"], found["non_finite"]) == ([2], None, 1)
    assert changed(tmp_path / "e", torch.ones(3).bfloat16(), 2, 1.5)["max_abs"] == 0.5
    found = changed(tmp_path / "f", torch.ones(2, 2).to(torch.float8_e4m3fn), (1, 0), 4.0)
    assert (found["first"], found["max_abs"], found["max_rel"]) == ([1, 0], 3.0, 0.75)
    wide = torch.ones(2, dtype=torch.complex128)
    assert changed(tmp_path / "g", wide, 1, 1 + 2j)["max_abs"] == 2.0
    assert changed(tmp_path / "h", torch.tensor([True, False]), 1, True)["max_abs"] == 1
    assert changed(tmp_path / "i", torch.tensor(2.0), (), 3.0)["first"] == []
    many = torch.zeros(3, 400_000, dtype=torch.uint8)  # more than are compared at a time
    assert changed(tmp_path / "k", many, (2, 399_999), 255)["first"] == [2, 399_999]
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    save(tmp_path / "j", {"w": packed}, {"w": torch.ones(4).byte().view(torch.bits8)})
    (found,) = difference(tmp_path / "j")["tensors"]
    assert (found["differing"], found["max_abs"]) == (4, None)


def test_other_differences_than_of_elements(tmp_path: Path) -> None:
    numbers = {"nan": math.nan, "lr": 0.1, "betas": (0.9, 0.99), "rng": torch.arange(2000)}
    one = {
        "w": torch.ones(2),
        "half": torch.ones(3),
        "was": torch.ones(1),
        "old": 1,
        "n": [numbers],
    }
    other = {"w": torch.ones(3), "half": torch.ones(3).half(), "was": 2, "new": torch.ones(1)}
    save(tmp_path, one, {**other, "n": [{**numbers, "lr": 0.2, "betas": (0.9, 0.999)}]})
    found = difference(tmp_path)
    assert found["only_in_a"] == ["old"]
    assert found["only_in_b"] == ["new"]
    assert found["kinds"] == {
        "half": ["float32 [3]", "float16 [3]"],
        "w": ["float32 [2]", "float32 [3]"],
        "was": ["float32 [1]", "a value"],
    }
    assert found["values"] == {
        "n.0.betas": ["(0.9, 0.99)", "(0.9, 0.999)"],
        "n.0.lr": ["0.1", "0.2"],
    }
    assert found["equal"] == 2
    done = outlast("diff", tmp_path, tmp_path, "--step-a", 1)
    assert "n.0.lr: 0.1 in A, 0.2 in B" in done.stdout
    assert "half: float32 [3] in A, float16 [3] in B" in done.stdout
    assert "only in B: new" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "different values: 2, of another type or shape: 3, only in A: 1, only in B: 1, equal: 2"
    )


def test_values_that_are_equal_though_their_pickles_differ(tmp_path: Path) -> None:
    text = "x" * 3
    save(
        tmp_path,
        {"v": (text, text), "w": torch.ones(1)},
        {"v": (text, "xx" + text[:1]), "w": torch.ones(1)},
    )
    assert difference(tmp_path)["different"] is False
    sparse = [torch.sparse_coo_tensor([[0]], [x], (3,), check_invariants=True) for x in (1.0, 2.0)]
    save(tmp_path / "s", *({"v": each, "w": torch.ones(1)} for each in sparse))
    assert list(difference(tmp_path / "s")["values"]) == ["v"]
    one, other = torch.zeros(5000), torch.zeros(5000)
    other[2500] = 1  # not in the text of a long tensor
    save(tmp_path / "t", *({"v": (each,), "w": torch.ones(1)} for each in (one, other)))
    assert list(difference(tmp_path / "t")["values"]) == ["v"]


def test_equal_stored_checksums_are_not_read_and_the_rest_is_verified(tmp_path: Path) -> None:
    frozen, head = torch.randn(2 << 20), torch.zeros(1000)
    # The last chunk of the second one is the head's too.
    state = {"frozen": [frozen, frozen + 1], "head": head}
    save(tmp_path, state, {**state, "head": head + 1})
    file = folder_of(tmp_path, 1) / TENSORS
    flip_byte(file, 1000)  # a chunk that both have
    (found,) = difference(tmp_path)["tensors"]
    assert (found["name"], found["differing"], found["max_abs"]) == ("head", 1000, 1.0)
    flip_byte(file, file.stat().st_size - 1000)
    done = outlast("diff", tmp_path, tmp_path, "--step-a", 1, "--step-b", 2)
    said = error(done, code=2)
    assert "step-00000001/" in said
    assert "is damaged between bytes" in said
    assert done.stdout == ""


def test_other_places_of_an_equal_file_are_compared(tmp_path: Path) -> None:
    files = {"f": np.arange(4, dtype=np.int32).tobytes()}
    for step, at in enumerate((0, 8), 1):
        tensors = {"w": TensorEntry(["w"], "int32", [2], [Shard([0], [2], "f", at)])}
        made.save(LocalStorage(tmp_path), step, files, tensors=tensors)
    (found,) = difference(tmp_path)["tensors"]
    assert (found["differing"], found["max_abs"]) == (2, 2)
    files = {"f": bytes(4), "g": bytes([1, 0, 0, 0])}
    for step, (first, second) in enumerate(("fg", "gf"), 3):
        shards = [Shard([0], [1], first, 0), Shard([1], [1], second, 0)]
        tensors = {"w": TensorEntry(["w"], "int32", [2], shards)}
        made.save(LocalStorage(tmp_path), step, files, tensors=tensors)
    (found,) = difference(tmp_path, "--step-a", 3, "--step-b", 4)["tensors"]
    assert (found["differing"], found["max_abs"]) == (2, 1)


def test_the_distribution_over_files_makes_no_difference(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.int32).reshape(4, 6)

    def save(step: int, values: np.ndarray[Any, Any], *cuts: tuple[int, int, int, int]) -> None:
        files, shards = {}, []
        for number, (top, bottom, left, right) in enumerate(cuts):
            part = values[top:bottom, left:right]
            files[f"{number}"] = b"???" * number + part.tobytes()
            shards.append(Shard([top, left], list(part.shape), f"{number}", 3 * number))
        tensors = {"w": TensorEntry(["w"], "int32", [4, 6], shards)}
        made.save(LocalStorage(tmp_path), step, files, tensors=tensors)

    other = values.copy()
    other[2, 5] = -1
    save(1, values, (0, 4, 0, 6))
    save(2, values, (0, 1, 2, 6), (0, 4, 0, 2), (1, 4, 2, 6))
    save(3, other, (0, 2, 0, 6), (2, 4, 0, 3), (2, 4, 3, 6))
    assert difference(tmp_path)["different"] is False
    (found,) = difference(tmp_path, "--step-a", 2, "--step-b", 3)["tensors"]
    assert (found["first"], found["max_abs"], found["differing"]) == ([2, 5], 18, 1)
    for step, expected in ((2, values), (3, other)):
        file = tmp_path / f"{step}.safetensors"
        assert outlast("export", tmp_path, "--step", step, "-o", file).exit_code == 0
        assert np.array_equal(read_safetensors(file)[0]["w"].numpy(), expected)

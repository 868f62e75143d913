"""For tests of `outlast checkpoint`: calls it, and has checkpoints to export and compare."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from click.testing import Result
from typer.testing import CliRunner

from async_checkpoint.checkpoints import NET
from outlast.async_checkpoint import Checkpointer
from outlast.launch.cli import app

# By the format's description: https://huggingface.co/docs/safetensors
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool},
    "C64": torch.complex64,
}


def outlast(*arguments: object, stdin: str = "") -> Result:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def error(result: Result, code: int = 1) -> str:
    """What the command has printed on standard error, with the exit code `code`."""
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

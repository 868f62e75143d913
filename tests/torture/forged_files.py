"""Forged and corrupted files: whatever is in the newest checkpoint, a restore never believes it.

A trial has a folder with two checkpoints. It changes the newer one: a bit, a range or the length of
a file; a file replaced by something that is none; a manifest with lies, whose checksums are right;
a value with other bytes, whose checksums are right. A restore must then find one of the two
checkpoints, complete, or raise `CheckpointError`; in bounded time and memory. Some lies
cannot be told from the truth, and must only do no other harm: an entry that is missing; bytes of a
tensor at another place of its file that no other entry uses, or of another dtype, for a target that
has none.

python -m torture.forged_files --seconds 60 --seed 0
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import os
import resource
import shutil
import stat
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.storage import directory
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.storage.manifest import MANIFEST, checksum, pieces
from outlast.errors import CheckpointError

MEMORY_BYTES = 2 << 30
"""How much more memory a restore may use than the process has: forged sizes are far larger."""
_STEPS = (1, 2)
_FOLDER = "step-00000002"


def state_of(step: int) -> dict[str, Any]:
    """A state of which every part depends on the step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"w": torch.randn(6, 8, generator=generator), "b": torch.full((3,), float(step))},
        "list": [torch.full((2, 2), step), {"deep": torch.full((), step)}],
        "step": step,
        "pair": (step, "x"),
    }


def blank() -> dict[str, Any]:
    """A target for a restore; `{}` is another."""
    model = {"w": torch.zeros(6, 8), "b": torch.zeros(3)}
    inner = [torch.zeros(2, 2, dtype=torch.int64), {"deep": torch.zeros((), dtype=torch.int64)}]
    return {"model": model, "list": inner, "step": None, "pair": None}


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(*p) for p in zip(one, other, strict=True))
    return bool(one == other)


# ------------------------------------------------------------------------------------ corruptions


def corrupt(folder: Path, random: Random) -> str:
    """Changes one file; returns what was done."""
    file = random.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    content = bytearray(file.read_bytes())
    at = random.randrange(len(content))
    kind = random.choice(["bit", "zeros", "noise", "cut", "longer", "turned", "gone", *_NO_FILES])
    if kind == "bit":
        content[at] ^= 1 << random.randrange(8)
    elif kind == "zeros":
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    elif kind == "noise":
        content[at : at + 64] = random.randbytes(len(content[at : at + 64]))
    elif kind == "cut":
        del content[at:]
    elif kind == "longer":
        content += random.randbytes(random.choice([1, 4096]))
    elif kind == "turned":
        content = content[at:] + content[:at]
    file.unlink()
    if kind in _NO_FILES:
        _NO_FILES[kind](file)
    elif kind != "gone":
        file.write_bytes(content)
    return f"{file.name}: {kind} at {at}"


def _outside(file: Path) -> None:
    file.with_name("outside").write_bytes(b"secret")
    file.symlink_to(file.with_name("outside"))


def _sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 42)


_NO_FILES: dict[str, Callable[[Path], None]] = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "socket": lambda file: os.mknod(file, stat.S_IFSOCK | 0o600),
    "device": lambda file: file.symlink_to("/dev/zero"),
    "link": _outside,
    "loop": lambda file: file.symlink_to(file),
    "sparse": _sparse,
}


# -------------------------------------------------------------------------- lies, well checksummed


def forge(folder: Path, random: Random) -> str:
    """Puts lies into the manifest, and makes its checksums right; returns the lies."""
    values = manifest_of(folder)
    truth = _copy(values)
    done = "; ".join(_lie(values, random) for _ in range(random.choice([1, 1, 1, 2, 3])))
    body = json.dumps(values).encode()
    if random.random() < 0.1:
        body, done = random.choice(_BODIES)(body), f"{done}; in another form"
    version = random.choice([1, 0, -1, 3, 10**30, True, None, "2", 2.0])
    write_manifest(folder, body, values, version if random.random() < 0.1 else 2)
    return f"{_PLAUSIBLE if _plausible(values, truth) else ''}{done}; version {version}"


_PLAUSIBLE = "plausible: "


def _plausible(values: Any, truth: Any) -> bool:
    """Whether lies are of the kinds that the module names."""
    if isinstance(values, dict) and isinstance(truth, dict):
        for name in ("tensors", "values"):
            inner, real = values.get(name), truth.get(name)
            if isinstance(inner, dict) and isinstance(real, dict):
                truth = {**truth, name: {key: real[key] for key in real if key in inner}}
    return _without_places(values) == _without_places(truth)


def _without_places(values: Any) -> Any:
    if isinstance(values, dict):
        kinds = ({"offsets", "sizes", "file", "at"}, {"path", "dtype", "shape", "shards"})
        left = ("at", "dtype") if values.keys() in kinds else ()
        return {key: _without_places(inner) for key, inner in values.items() if key not in left}
    return [_without_places(each) for each in values] if isinstance(values, list) else values


def manifest_of(folder: Path) -> dict[str, Any]:
    """The body of a manifest."""
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes().partition(b"\n")[2])
    return found


def write_manifest(folder: Path, body: bytes, values: Any, version: Any = 2) -> None:
    """Writes a manifest with the right checksums."""
    head = {"format": "outlast-checkpoint", "version": version}
    head |= {name: values.get(name) for name in ("step", "save_id")}
    line = json.dumps({**head, "bytes": len(body), "xxh3_128": checksum(body)}).encode()
    if version != 1:
        line = line[:-1] + b', "line_xxh3_128": "' + checksum(line).encode() + b'"}'
    (folder / MANIFEST).write_bytes(line + b"\n" + body)


_BODIES: list[Callable[[bytes], bytes]] = [
    lambda body: b"[" * 10**6,
    lambda body: b'{"a":' * 10**5,
    lambda body: body.replace(b'"step"', b'"step": 1, "step"', 1),
    lambda body: body[: len(body) // 2],
    lambda body: body.decode().encode("utf-16"),
    lambda body: b"9" * 10**6,
    lambda body: b"null",
    lambda body: b"",
]
_ODD: list[Any] = [
    0, 1, -1, 2, 7, 64, 1 << 20, 1 << 31, 1 << 40, (1 << 62) - 1, 1 << 63, 10**400, 0.5, math.nan,
    math.inf, True, None, "", "w", "../x", "/etc/passwd", "\0", "\ud800", "a" * 5000, "float64",
    "int64", "load", [], {}, [0], [-1], [1 << 40], [[0]], [[1 << 40]], ["model", "w"], [None],
    {"a": 1}, "__0_0.distcp", "__0_values.distcp", MANIFEST, ".",
]  # fmt: skip


def _lie(values: Any, random: Random) -> str:
    """Changes one place of a JSON value: another value, one less, one more, or a key."""
    places = list(_places(values))
    path, holder, key = random.choice(places)
    kind = random.choice(["odd", "odd", "near", "drop", "twice", "other", "rename"])
    value = holder[key]
    if kind == "near" and type(value) is int:
        holder[key] = value + random.choice([-1, 1, 4, -4, 64, 4096])
    elif kind == "drop":
        del holder[key]
    elif kind == "twice" and isinstance(holder, list):
        holder.insert(random.randrange(len(holder) + 1), _copy(value))
    elif kind == "other":
        other, holder2, key2 = random.choice(places)
        holder[key] = _copy(holder2[key2])
        kind = f"as {other}"
    elif kind == "rename" and isinstance(holder, dict):
        holder[str(random.choice(_ODD))[:300]] = holder.pop(key)
    else:
        holder[key] = _copy(random.choice(_ODD))
        kind = f"is {str(holder[key])[:40]}"
    return f"{path} {kind}"


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _places(values: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
        yield f"{path}/{str(key)[:20]}", values, key
        if isinstance(value, dict | list):
            yield from _places(value, f"{path}/{str(key)[:20]}")


def forge_value(folder: Path, random: Random) -> str:
    """Changes bytes of a pickled value, or replaces it, and makes all checksums right."""
    values = manifest_of(folder)
    name = random.choice(sorted(values["values"]))
    entry = values["values"][name]
    file = folder / str(entry["file"])
    content = bytearray(file.read_bytes())
    if random.random() < 0.5:
        done = "other bytes"
        for _ in range(random.choice([1, 2, 8])):
            at = int(entry["at"]) + random.randrange(int(entry["size_bytes"]))
            content[at] = random.randrange(256)
    else:
        node: Any = {"__outlast__": random.choice(_KINDS)}
        for key in random.sample(_FIELDS, random.randrange(len(_FIELDS))):
            node[key] = random.choice([*_ODD, *_TYPES, torch.zeros(8).byte(), "<f8", "|O"])
        written = io.BytesIO()
        torch.save((node,), written)
        done = str(node)[:300]
        entry.update(at=len(content), size_bytes=len(written.getvalue()))
        content += written.getvalue()
    file.write_bytes(content)
    sums = [checksum(content[at : at + n]) for at, n in pieces(len(content), values["chunk_bytes"])]
    values["files"][file.name].update(size_bytes=len(content), checksums=sums)
    write_manifest(folder, json.dumps(values).encode(), values)
    return f"the value {name!r}: {done}"


_KINDS = ["array", "scalar", "dtype", "enum", "namedtuple", "dataclass", "namespace", "dict",
          "zone", "deque", "set", "frozenset", "date", "time", "datetime", "timedelta", "timezone",
          "path", "range", "decimal", "bytes", "MINYEAR", "system"]  # fmt: skip
_FIELDS = ["type", "name", "value", "items", "fields", "args", "of", "text", "dtype", "shape",
           "data", "key", "maxlen", "fold"]  # fmt: skip
_TYPES = ["os:system", "subprocess:Popen", "builtins:eval", "enum:Enum", "builtins:tuple",
          "dataclasses:Field", "torch.nn:Module", "Namespace", "dict", "PosixPath"]  # fmt: skip


# ------------------------------------------------------------------------------------------ trials


def try_forged_files(seed: int, *, until: float, most: int | None = None) -> tuple[int, list[str]]:
    """Damages and forges until `until` (monotonic), or `most` times, in an order given by the seed.
    Returns how many files were tried, and what was violated.
    """
    random = Random(seed)
    tried, violations = 0, []
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        template, run = Path(name, "template"), Path(name, "run")
        with Checkpointer(template) as checkpointer:
            for step in _STEPS:
                checkpointer.save(step, state_of(step)).wait()
        shutil.copytree(template, run)
        with Checkpointer(run) as checkpointer:
            checkpointer.restore(blank())
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, limits[1]))
            try:
                while time.monotonic() < until and tried != most:
                    shutil.rmtree(run / _FOLDER)
                    shutil.copytree(template / _FOLDER, run / _FOLDER)
                    change = random.choice([corrupt, forge, forge, forge_value])
                    done = change(run / _FOLDER, random)
                    tried += 1
                    if wrong := _try(checkpointer, run, change is forge_value, done):
                        violations.append(f"trial {tried}: {done}: {wrong}")
            finally:
                resource.setrlimit(resource.RLIMIT_AS, limits)
    return tried, violations


def _try(checkpointer: Checkpointer, run: Path, of_values: bool, done: str) -> str:
    """What is wrong after a change, if anything is."""
    storage = LocalStorage(str(run))
    targets: list[dict[str, Any]] = [blank(), {}]
    for target in targets:
        try:
            step = checkpointer.restore(target)
        except CheckpointError:
            continue
        except BaseException:  # noqa: BLE001 - each is a violation
            return traceback.format_exc()
        expected = state_of(step or 0)
        if of_values:  # another value with right checksums is one that was saved
            expected |= {name: target[name] for name in ("step", "pair")}
        if done.startswith(_PLAUSIBLE) and step == _STEPS[-1]:
            continue
        if step not in _STEPS or not same(target, expected):
            return f"step {step} was restored as {target}"
    uses: list[Callable[[], object]] = [
        lambda: directory.verify(storage, 2),
        lambda: directory.survey(storage),
        checkpointer.checkpoints,
    ]
    for use in uses:
        try:
            use()
        except CheckpointError:
            pass
        except BaseException:  # noqa: BLE001 - each is a violation
            return traceback.format_exc()
    return ""


def main() -> int:
    """The program `python -m torture.forged_files`; returns its exit code."""
    parser = argparse.ArgumentParser(prog="torture.forged_files", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--most", type=int, help="how many files are tried")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    until = time.monotonic() + arguments.seconds
    tried, violations = try_forged_files(arguments.seed, until=until, most=arguments.most)
    print(f"seed {arguments.seed}: {tried} files, {len(violations)} violations")
    print("\n".join(violations[:20]))
    return bool(violations)


if __name__ == "__main__":
    raise SystemExit(main())

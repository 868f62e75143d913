"""`python -m benchmarks.gpu`: the tests marked `gpu`, then the benchmarks on the GPU (`make gpu`).

Without a CUDA device it says so, ends with code 2, and writes nothing: there are no figures.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NEEDED = ("torch", "psutil", "typer", "rich", "xxhash", "pytest", "pytest_timeout", "hypothesis")
NO_DEVICE = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    out: Path = parser.parse_args().out
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return _refuse(
            f"{sys.executable} lacks {', '.join(missing).replace('_', '-')}. Install them, or give "
            "a folder with their wheels: make gpu WHEELS=DIR"
        )
    for name in ("results.json", "results.md"):
        (out / name).unlink(missing_ok=True)  # never those of an earlier run
    import torch

    if not torch.cuda.is_available():
        build = torch.version.cuda
        why = (
            f"torch {torch.__version__} is built for CUDA {build}"
            if build
            else (f"torch {torch.__version__} is a build without CUDA")
        )
        return _refuse(f"no CUDA device: {why}. Nothing was run, nothing was written")
    from benchmarks.gpu.runs import run_all

    return run_all(out)


def _refuse(why: str) -> int:
    print(f"make gpu: {why}.", file=sys.stderr)
    return NO_DEVICE


if __name__ == "__main__":
    sys.exit(main())

"""Unpacks the libraries of a build of torch for CUDA, and of the NCCL that it requires, from the
package index, without installing them: `python cuda_build.py VERSION FOLDER`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

_LIBRARIES = re.compile(r"torch/lib/libtorch_(cpu|cuda|python)\.so|nvidia/nccl/lib/.*")


def unpacked(requirement: str, folder: Path) -> str:
    """Downloads a wheel, unpacks its libraries into `folder`; returns its metadata."""
    wheels = folder / "wheels"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    subprocess.run([*command, f"--dest={wheels}", requirement], check=True)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        content.extractall(folder, filter(_LIBRARIES.fullmatch, names))
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = content.read(metadata).decode()
    wheel.unlink()
    return text


def main(version: str, folder: Path) -> None:
    # `===`: a wheel of another source with a local version, such as 2.13.0+cpu, is not equal.
    metadata = unpacked(f"torch==={version}", folder)
    found = re.search(r"^Requires-Dist: (nvidia-nccl-cu\d+)[ (]*(==[\d.]+)", metadata, re.MULTILINE)
    if found is None:
        sys.exit(f"torch {version} requires no nvidia-nccl: this is not a build for CUDA")
    unpacked(f"{found[1]}{found[2]}", folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

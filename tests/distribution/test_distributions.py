"""What is in the sdist, and in the wheel that is built from it.

`make dist` names the folder with both in `OUTLAST_DIST`; otherwise they are built here.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pytest
from packaging.metadata import Metadata

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with one sdist and one wheel."""
    if built := os.environ.get("OUTLAST_DIST"):
        return Path(built)
    out = tmp_path_factory.mktemp("dist")
    # The sdist, and the wheel from it. Nothing is installed, so that no network is needed.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


@contextmanager
def opened_wheel(folder: Path) -> Iterator[zipfile.ZipFile]:
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        yield wheel


def sources(*folders: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".typed", ".css", ".js", ".jinja", ".md")
    }


def test_the_wheel_has_the_package_and_nothing_else(folder: Path) -> None:
    with opened_wheel(folder) as wheel:
        names = {PurePosixPath(name) for name in wheel.namelist()}
    info = {name for name in names if name.parts[0].endswith(".dist-info")}
    package = {str("src" / name) for name in names - info}
    assert package == sources("src")
    assert "src/outlast/py.typed" in package
    assert {str(PurePosixPath(*name.parts[1:])) for name in info} == {
        *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"),
    }


def test_the_sdist_has_the_sources_tests_and_documentation(folder: Path) -> None:
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in sdist.getnames()}
    assert names >= sources("src", "tests", "benchmarks", "examples", "docs")
    top = {name for name in names if "/" not in name}
    assert top >= {"PKG-INFO", "LICENSE", "Makefile", "README.md", "mkdocs.yml", "pyproject.toml"}
    folders = {name.partition("/")[0] for name in names - top}
    assert folders == {"src", "tests", "benchmarks", "examples", "docs"}


def test_the_metadata_is_valid(folder: Path) -> None:
    with opened_wheel(folder) as wheel:
        texts = {PurePosixPath(n).name: n for n in wheel.namelist() if ".dist-info/" in n}
        metadata = Metadata.from_email(wheel.read(texts["METADATA"]), validate=True)
        entry_points = configparser.ConfigParser()
        entry_points.read_string(wheel.read(texts["entry_points.txt"]).decode())
    assert metadata.name == "outlast"
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert set(entry_points["console_scripts"]) == {"outlast"}
    assert set(entry_points["torchrun.handlers"]) == {"outlast-etcd"}

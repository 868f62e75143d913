"""The end of a process: no search for garbage, and nothing that was written is lost."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outlast.system.main_program import without_collections

PROGRAM = """
import atexit, pathlib, sys
class Node:
    def __init__(self):
        self.me, self.file = self, open(sys.argv[1], "w")
        self.file.write("kept")
    def __del__(self):
        print("found by a search")
node = Node()
free = open(sys.argv[1] + ".free", "w")
free.write("kept too")
"""
CALLS = {
    "frozen": "import gc, outlast.system.main_program as f\ngc.freeze()\nf.exit_fast()\n",
    "directly": "from outlast.system.main_program import exit_fast\nexit_fast()\nexit_fast()\n",
    "wrapped": "from outlast.inprocess import Wrapper\nWrapper()(lambda: None)()\n",
}


@pytest.mark.parametrize(
    "how", ["directly", "frozen", pytest.param("wrapped", marks=pytest.mark.slow)]
)
def test_no_search_and_no_loss(tmp_path: Path, how: str) -> None:
    path = tmp_path / "file"
    command = [sys.executable, "-c", PROGRAM + CALLS[how], str(path)]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "found by a search" not in done.stdout, done.stderr
    assert path.read_text() == "kept"
    assert Path(f"{path}.free").read_text() == "kept too"


EXTENSION = """
#include <nanobind/nanobind.h>
struct Thing { Thing() {} };
NB_MODULE(things, m) {
    nanobind::class_<Thing>(m, "Thing", nanobind::dynamic_attr()).def(nanobind::init<>());
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_library_that_counts_what_the_search_has_freed(tmp_path: Path) -> None:
    """nanobind, of which triton is made, prints some lines for each object that is left."""
    nanobind = pytest.importorskip("nanobind")
    folder = Path(nanobind.__file__).parent
    (tmp_path / "things.cpp").write_text(EXTENSION)
    headers = [
        sysconfig.get_paths()["include"],
        nanobind.include_dir(),
        str(folder / "ext/robin_map/include"),
    ]
    sources = [str(tmp_path / "things.cpp"), str(folder / "src/nb_combined.cpp")]
    library = tmp_path / f"things{sysconfig.get_config_var('EXT_SUFFIX')}"
    options = ["-shared", "-fPIC", "-std=c++17", *(f"-I{each}" for each in headers)]
    subprocess.run(["g++", *options, *sources, "-o", str(library)], check=True)
    program = "import things\nthing = things.Thing()\nthing.itself = thing\n" + CALLS["directly"]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout + done.stderr == ""


def test_the_collector_is_off_only_within_and_only_in_the_main_thread() -> None:
    def fails() -> bool:
        assert not gc.isenabled()
        raise KeyError

    assert gc.isenabled()
    assert not without_collections(gc.isenabled)
    assert gc.isenabled()
    with pytest.raises(KeyError):
        without_collections(fails)
    assert gc.isenabled()
    with ThreadPoolExecutor() as pool:
        assert pool.submit(without_collections, gc.isenabled).result()
    gc.disable()
    try:
        without_collections(gc.isenabled)
        assert not gc.isenabled()
    finally:
        gc.enable()

"""One process: a load finds the newest valid checkpoint, and a save leaves no other."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import hypothesis
import pytest
from hypothesis import strategies as st

from async_checkpoint.storage.manifests import forged
from elastic.states.test_state import NAMES, ODD
from elastic.text_state import Failing, Text
from outlast.async_checkpoint import Retention
from outlast.async_checkpoint.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    decode,
)
from outlast.coordination.training_step import observed_steps
from outlast.elastic import State, load_all_states, load_state, save_all_states, save_state
from outlast.elastic.states import storage
from outlast.elastic.states.state import file_name
from outlast.errors import CheckpointError

DATA = "__0_0.distcp"  # of rank 0


def names_in(folder: Path) -> list[str]:
    """The checkpoints; the files of the checkpointer are hidden."""
    storage.release()  # it removes the previous checkpoint in the background
    return sorted(path.name for path in (folder / "states").glob("[!.]*"))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def keep_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had been killed between the commit and the removal of the previous one."""
    monkeypatch.setattr(Retention, "removable", lambda *args: [])


def test_what_is_saved_is_loaded(folder: Path) -> None:
    state = Text("a", "first")
    where = save_all_states()
    assert where == str(folder / "states" / "step-00000001")
    assert names_in(folder) == ["step-00000001"]
    state.text = "lost"
    assert load_state(state)
    assert state.text == "first"
    assert state.calls == ["sync", "save", "load"]


def test_the_number_of_a_save_is_no_training_step(folder: Path) -> None:
    state, steps = Text("a", "1"), []
    with observed_steps(lambda step, completed: steps.append(step)):
        save_all_states()
    assert state.text == "1"
    assert steps == []


def test_without_a_path_nothing_is_saved_or_loaded() -> None:
    state = Text("a", "first")
    assert save_all_states() is None
    assert save_all_states(asynchronous=True) is None
    assert not load_state(state)
    assert load_all_states() == []
    assert state.calls == []


def test_nothing_was_saved_yet(folder: Path) -> None:
    state = Text("a")
    assert not load_state(state)
    assert not folder.exists()
    folder.mkdir()
    assert not load_state(state)
    assert state.calls == []


def test_no_states_at_all(folder: Path) -> None:
    gc.collect()  # a state of an earlier test may be in a cycle
    assert save_all_states() == str(folder / "states" / "step-00000001")
    assert not load_state(Text("a"))


def test_a_second_save_replaces_the_first(folder: Path) -> None:
    state = Text("a", "first")
    save_all_states()
    state.text = "second"
    assert save_all_states() == str(folder / "states" / "step-00000002")
    assert names_in(folder) == ["step-00000002"]
    state.text = ""
    assert load_state(state)
    assert state.text == "second"


@hypothesis.given(st.dictionaries(NAMES, st.binary(max_size=100), max_size=6))
@hypothesis.example(dict.fromkeys(ODD, b"odd"))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_any_name_and_any_content_come_back(folder: Path, contents: dict[str, bytes]) -> None:
    class Bytes(State):
        content = b""

        def save(self, fileobj: BinaryIO) -> None:
            fileobj.write(self.content)

        def load(self, fileobj: BinaryIO) -> None:
            self.content = fileobj.read()

    states = {name: Bytes(name) for name in contents}
    for name, state in states.items():
        state.content = contents[name]
    save_all_states()
    for state in states.values():
        state.content = b"?"
    assert load_all_states() == sorted(contents)
    assert {name: state.content for name, state in states.items()} == contents


def test_states_that_came_or_went(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    stays, goes = Text("stays", "1"), Text("goes", "2")
    save_all_states()
    del goes
    comes = Text("comes", "untouched")
    stays.text = ""
    with caplog.at_level(logging.INFO, "outlast.elastic"):
        assert load_all_states() == ["stays"]
    assert "the state 'comes' is not in" in caplog.text
    assert not load_state(comes)
    assert (stays.text, comes.text, comes.calls) == ("1", "untouched", [])
    save_all_states()
    assert not load_state(Text("goes"))
    assert load_state(comes)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("method", ["save", "sync"])
def test_a_state_that_raises_in_a_save(folder: Path, method: str, asynchronous: bool) -> None:
    good = Text("a", "first")
    save_all_states()
    bad = Failing("b", method)
    good.text = "second"
    with pytest.raises(CheckpointError, match=f"state 'b'.*RuntimeError: no {method} today") as e:
        save_all_states(asynchronous)
    assert e.value.__cause__ is not None
    assert names_in(folder) == ["step-00000001"]
    assert load_state(good)
    assert good.text == "first"
    bad.methods.clear()
    assert save_all_states() == str(folder / "states" / "step-00000002")


def test_a_state_that_raises_in_its_load(folder: Path) -> None:
    states = [Text("a", "1"), Failing("b", "load")]
    save_all_states()
    with pytest.raises(CheckpointError, match="'b' could not be loaded: RuntimeError: no load"):
        load_state(states[1])
    assert load_state(states[0])


def test_an_interrupt_in_a_save_leaves_nothing(folder: Path) -> None:
    class Interrupted(State):
        def save(self, fileobj: BinaryIO) -> None:
            raise KeyboardInterrupt

    state = Interrupted("a")
    with pytest.raises(KeyboardInterrupt):
        save_all_states()
    assert names_in(folder) == []
    del state
    assert save_all_states() is not None


def test_a_state_that_closes_or_rewinds_its_file(folder: Path) -> None:
    class Rude(State):
        text = b""

        def save(self, fileobj: BinaryIO) -> None:
            fileobj.write(b"xxxx")
            fileobj.seek(0)
            fileobj.truncate()
            fileobj.write(b"right")
            fileobj.close()

        def load(self, fileobj: BinaryIO) -> None:
            self.text = fileobj.read()
            fileobj.close()

    state = Rude("rude")
    for asynchronous in (False, True):
        save_all_states(asynchronous)
        state.text = b""
        assert load_state(state)
        assert state.text == b"right"


# ------------------------------------------------------------------------------------- damage


def test_a_damaged_checkpoint_is_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = Text("a", "old"), Text("b", "old")
    save_all_states()
    keep_old(folder, monkeypatch)
    a.text = b.text = "new"
    save_all_states()
    damage(folder / "states" / "step-00000002" / DATA)
    # Not only `b`: the states of one run belong together.
    assert load_state(a)
    assert load_state(b)
    assert (a.text, b.text) == ("old", "old")
    assert "passed over" in caplog.text
    assert f"{DATA}: damaged between bytes 0 and " in caplog.text


@pytest.mark.parametrize("how", ["cut", "longer", "gone", "manifest", "manifest cut", "a folder"])
def test_every_kind_of_damage_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    state = Text("a", "old")
    save_all_states()
    keep_old(folder, monkeypatch)
    state.text = "new"
    save_all_states()
    file = folder / "states" / "step-00000002" / DATA
    manifest = folder / "states" / "step-00000002" / MANIFEST
    if how == "cut":
        file.write_bytes(b"ne")
    elif how == "longer":
        file.write_bytes(file.read_bytes() + b"!")
    elif how == "gone":
        file.unlink()
    elif how == "manifest":
        damage(manifest)
    elif how == "manifest cut":
        manifest.write_bytes(manifest.read_bytes()[:10])
    else:
        file.unlink()
        file.mkdir()
    assert load_state(state)
    assert state.text == "old"
    # The next save is newer than both.
    assert save_all_states() == str(folder / "states" / "step-00000003")


def test_none_is_valid(folder: Path) -> None:
    state = Text("a", "only")
    save_all_states()
    damage(folder / "states" / "step-00000001" / DATA)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* is valid"):
            load_state(state)
    assert state.calls == ["sync", "save"]


def test_damage_after_the_choice_is_an_error_and_then_chosen_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = Text("a", "old"), Text("b", "old")
    save_all_states()
    keep_old(folder, monkeypatch)
    a.text = b.text = "new"
    save_all_states()
    assert load_state(a)
    damage(folder / "states" / "step-00000002" / DATA)
    with pytest.raises(CheckpointError, match=r"state 'b' .* is damaged"):
        load_state(b)
    assert load_all_states() == ["a", "b"]
    assert (a.text, b.text) == ("old", "old")


def test_a_later_format_is_neither_passed_over_nor_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Text("a", "old")
    save_all_states()
    keep_old(folder, monkeypatch)
    save_all_states()
    monkeypatch.undo()
    monkeypatch.setenv("OUTLAST_CHECKPOINT_PATH", str(folder))
    manifest = folder / "states" / "step-00000002" / MANIFEST
    later = {"version": FORMAT_VERSION + 1}
    manifest.write_bytes(forged(decode(manifest.read_bytes(), ""), later, b"later"))
    with pytest.raises(CheckpointError, match=f"format {FORMAT_VERSION + 1}, .*update outlast"):
        load_state(state)
    save_all_states()
    assert names_in(folder) == ["step-00000002", "step-00000003"]


# --------------------------------------------------------------------- folders of other programs


def test_what_is_not_ours_is_left_alone(folder: Path) -> None:
    for name in ("notes", "step-00000001", ".tmp-step-00000001-abc", "states-00000007"):
        (folder / name).mkdir(parents=True)
        (folder / name / "n.txt").write_text("mine")
    before = sorted(os.listdir(folder))
    state = Text("a", "ours")
    assert not load_state(state)
    for _ in range(2):
        save_all_states()
    assert load_state(state)
    assert sorted(os.listdir(folder)) == sorted([*before, "states"])
    assert all((folder / name / "n.txt").read_text() == "mine" for name in before)


def test_what_a_killed_save_has_left_is_removed_and_not_taken_along(folder: Path) -> None:
    left = folder / "states" / ".tmp-step-00000002-0123abcd"
    left.mkdir(parents=True)
    (left / DATA).write_text("half")
    state = Text("a", "ours")
    assert not load_state(state)
    assert left.exists()  # a load removes nothing
    save_all_states()
    assert names_in(folder) == ["step-00000001"]
    assert not left.exists()
    assert state.text == "ours"


def test_a_manifest_of_another_program_is_neither_read_nor_a_reason_to_remove(
    folder: Path,
) -> None:
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    (folder / "data.bin").write_text("mine")
    state = Text("a", "ours")
    assert not load_state(state)
    where = save_all_states()
    assert where is not None
    assert (folder / MANIFEST).read_text() == "{}"
    assert (folder / "data.bin").read_text() == "mine"
    assert os.path.isdir(where)
    assert load_state(state)


@pytest.mark.slow
def test_two_jobs_do_not_save_into_one_folder(folder: Path) -> None:
    folder.mkdir()
    code = (
        "import sys\n"
        "from elastic.text_state import Text\n"
        "from outlast.elastic import save_all_states\n"
        "state = Text('a')\n"
        "save_all_states()\n"
        "print('here', flush=True)\n"
        "sys.stdin.read()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(
            CheckpointError, match=f"in use by another job .process {other.pid} on "
        ):
            save_all_states()
        other.communicate()
    assert save_all_states() == str(folder / "states" / "step-00000002")


def test_a_folder_that_was_emptied(folder: Path) -> None:
    state = Text("a", "old")
    save_all_states()
    assert load_state(state)
    shutil.rmtree(folder)
    assert not load_state(state)


# --------------------------------------------------------------------------------- save_state


def test_a_state_is_saved_into_a_folder_of_ones_own(tmp_path: Path) -> None:
    state = Text("a/b", "one")
    for sync in (True, False):
        save_state(state, tmp_path / "mine" / "deep", sync=sync)
    save_state(state, None)
    assert state.calls == ["sync", "save", "save", "sync"]
    assert os.listdir(tmp_path / "mine" / "deep") == [file_name("a/b")]
    assert (tmp_path / "mine" / "deep" / file_name("a/b")).read_text() == "one"


def test_a_state_that_raises_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    state = Failing("a")
    save_state(state, str(tmp_path))
    state.methods.add("save")
    (tmp_path / file_name("a")).write_text("before")
    with pytest.raises(CheckpointError, match="'a' could not be saved: RuntimeError: no save"):
        save_state(state, str(tmp_path))
    assert os.listdir(tmp_path) == [file_name("a")]
    assert (tmp_path / file_name("a")).read_text() == "before"

"""What a save accepts, a default restore loads; the rest is refused at the save, by its name."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import io
import pathlib
import subprocess
import sys
import threading
import types
import zoneinfo
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_checkpoint.checkpoints import NET, folder_of
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.plain_values import Unsavable, decode, encode
from outlast.errors import CheckpointError, CheckpointMismatch
from procs import Job

Ranks = Callable[..., Job]


class Color(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: float
    y: Any


@dataclasses.dataclass
class Config:
    rate: float
    color: Color = Color.RED
    inner: Any = None

    def __post_init__(self) -> None:
        self.loaded = "no"  # not called by a load


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: tuple[int, ...] = ()


class Own:
    """A class that torch was told about."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.x == self.x

    def __hash__(self) -> int:
        return self.x

    def __repr__(self) -> str:
        return f"Own({self.x})"


CONFIG = Config(0.5, Color.BLUE, {"deep": [Frozen(1, (2, 3))]})
UTC, BERLIN = datetime.timezone.utc, zoneinfo.ZoneInfo("Europe/Berlin")
VALUES: dict[str, Any] = {
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "no rows": np.empty((0, 3), np.int16),
    "a number in an array": np.array(3.5),
    "big endian": np.arange(3, dtype=">i4"),
    "text": np.array(["a", "bcd"]),
    "no text": np.array(["", ""], dtype="<U0"),
    "times": np.array(["2026-01-01"], dtype="datetime64[s]"),
    "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "np.float64": np.float64(0.1),
    "np.bool": np.bool_(True),
    "np.dtype": np.dtype("float16"),
    "generator": np.random.RandomState(3).get_state(),
    "bit generator": (np.random.default_rng(3).bit_generator.state,),
    "dataclass": CONFIG,
    "frozen": Frozen(1),
    "enum": Color.RED,
    "flags": Rights.READ | Rights.WRITE,
    "no flag": Rights(0),
    "named tuple": Point(1.0, Point(2.0, [Color.BLUE])),
    "deque": collections.deque([1, Color.RED], maxlen=3),
    "datetime": datetime.datetime(2026, 3, 1, 2, 30, 1, 7, fold=1),
    "utc": datetime.datetime(2026, 3, 1, tzinfo=UTC),
    "zone": datetime.datetime(2026, 3, 1, tzinfo=BERLIN),
    "date": datetime.date(2026, 3, 1),
    "time": datetime.time(2, 30, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X")),
    "timedelta": datetime.timedelta(days=-1, microseconds=3),
    "frozen set": frozenset({1, "a", frozenset({2})}),
    "set of enums": {Color.RED, (Color.BLUE, 1)},
    "path": pathlib.Path("/a/b"),
    "namespace": argparse.Namespace(lr=0.1, where=pathlib.PurePosixPath("x")),
    "simple namespace": types.SimpleNamespace(a=np.int8(1)),
    "range": range(3, 30, 4),
    "decimal": decimal.Decimal("0.10"),
    "enum keys": ({Color.RED: 1, ("a", Color.BLUE): np.int64(2)},),
    "our key": ({"__outlast__": "enum", "type": "os:system"},),
    "ordered": (collections.OrderedDict(b=Color.RED, a=1), collections.Counter("aab")),
    "long integer": 1 << 1999,
    "complex": (1 + 2j, b"\0\xff", bytearray(b"x"), None, True, -0.0, "\ud800"),
    "torch": (torch.float16, torch.device("cpu"), torch.Size([1, 2]), torch.ones(2)),
    "sparse": (torch.eye(2).to_sparse(),),
    "indexes": list(range(10_000)),
    "a tensor inside": Config(1.0, inner=(torch.ones(3),)),
}


def equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        same = all(equal(getattr(one, name), getattr(other, name)) for name in names)
        return same and getattr(one, "__dict__", {}).keys() == getattr(other, "__dict__", {}).keys()
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | collections.deque):
        pairs = zip(one, other, strict=False)
        same = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return same and len(one) == len(other) and all(equal(a, b) for a, b in pairs)
    if isinstance(one, argparse.Namespace | types.SimpleNamespace):
        return equal(vars(one), vars(other))
    return (bool(one == other) and repr(one) == repr(other)) or isinstance(one, set | frozenset)


def test_all_of_them_come_back_from_storage_and_from_memory(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Own]):
        saved = {**VALUES, "own": Own(3)}
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, saved).wait(NET)
            found = dict.fromkeys(saved)
            assert checkpointer.restore(found) == 1
            assert [name for name in saved if not equal(saved[name], found[name])] == []
        with Checkpointer(tmp_path) as checkpointer:
            for target in (dict.fromkeys(saved), {}):
                assert checkpointer.restore(target) == 1
                assert [name for name in saved if not equal(saved[name], target[name])] == []


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
) | st.sampled_from([Color.RED, Rights.WRITE, np.int16(3), datetime.date(2026, 1, 1)])
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Point, st.floats(allow_nan=False), inner)
        | st.builds(Config, st.floats(allow_nan=False), st.sampled_from(Color), inner)
        | st.builds(collections.deque, st.lists(inner, max_size=3))
        | st.dictionaries(st.text(max_size=3) | st.just("__outlast__"), inner, max_size=3)
    ),
)


@given(trees)
def test_any_nesting_of_them_comes_back(value: Any) -> None:
    file = io.BytesIO()
    torch.save(encode(value), file)
    file.seek(0)
    assert equal(decode(torch.load(file, weights_only=True)), value)


@dataclasses.dataclass
class Counted(dict):  # type: ignore[type-arg]
    n: int = 0


def nested(levels: int) -> Any:
    value: Any = ()
    for _ in range(levels):
        value = (value, np.int8(1))
    return value


def itself() -> Any:
    value: list[Any] = [np.int8(1)]
    value.append((value,))
    return (value,)


REFUSED: dict[str, tuple[Any, str]] = {
    "function": ({"f": lambda: 1}, "'x.f' cannot be saved: a lambda"),
    "inside": (Config(1.0, inner=[1, threading.Lock]), r"'x.inner\[1\]' cannot be saved: a "),
    "a lock": ((1, {"a": threading.Lock()}), r"'x\[1\].a' cannot be saved: a lock"),
    "module": (sys, "'x' cannot be saved: a module"),
    "class": (Own, "'x' cannot be saved: a type"),
    "object": (Own(1), "'x' cannot be saved: a Own"),
    "objects": (np.array([Own(1)]), "'x' cannot be saved: a NumPy array of Python objects"),
    "masked": (np.ma.masked_array([1], [True]), "'x' cannot be saved: a MaskedArray"),
    "bits": ((1 << 9000,), r"'x\[0\]' cannot be saved: an integer of 9001 bits"),
    "bits in a row": (([1, 1 << 9000],), "an integer of 9001 bits"),
    "subclass": (Counted(), r"'x\[0\]' cannot be saved: a Counted"),
    "meta in a tuple": (
        (torch.empty(2, device="meta"),),
        r"'x\[0\]' .*: a meta tensor has no data",
    ),
    "meta": (torch.empty(2, device="meta"), "'x' is a meta tensor"),
    "deep": (nested(5000), "'x.*' cannot be saved: it is nested too deeply"),
    "cycle in a tuple": (itself(), r"'x\[0\]\[1\]\[0\]' cannot be saved: it contains itself"),
}


@pytest.fixture
def checkpointer(tmp_path: Path) -> Any:
    with Checkpointer(tmp_path / "c") as found:
        yield found


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_loaded_is_refused_by_name(name: str, checkpointer: Checkpointer) -> None:
    value, says = REFUSED[name]
    if name == "subclass":  # a mapping: its keys are saved, and its class is that of the target
        checkpointer.save(1, {"x": value}).wait(NET)
        value = (value,)
    with pytest.raises(CheckpointError, match=says):
        checkpointer.save(1, {"x": value})


INTO: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda value: (value,),
    "dict": lambda value: {"a": value},
    "deque": lambda value: collections.deque([value]),
    "dataclass": lambda value: Config(1.0, inner=value),
    "namespace": lambda value: argparse.Namespace(value=value),
}


@pytest.mark.parametrize("kind", INTO)
def test_the_deepest_value_that_is_saved_is_loaded(kind: str, checkpointer: Checkpointer) -> None:
    value: Any = 1
    for _ in range(149):
        value = INTO[kind](value)
    checkpointer.save(1, {"x": (value,)}).wait(NET)
    state: dict[str, Any] = {"x": None}
    assert checkpointer.restore(state) == 1
    assert equal(state["x"], (value,))
    with pytest.raises(CheckpointError, match=r"'x\[0\].*' cannot be saved: .* more than 150"):
        checkpointer.save(2, {"x": (INTO[kind](value),)})


@pytest.mark.parametrize("value", [np.bytes_(b""), np.str_(""), np.array(["", "a"])[0]], ids=repr)
def test_an_empty_scalar_text_comes_back(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


def test_a_namespace_with_a_field_named_self_comes_back() -> None:
    value = argparse.Namespace(**{"a": 1})
    value.self = 2
    assert decode(encode(value)) == value


def test_a_range_of_long_integers_is_refused() -> None:
    with pytest.raises(ValueError, match="an integer of 2101 bits"):
        encode(range(2**2100))


def test_a_local_class_is_refused(checkpointer: Checkpointer) -> None:
    @dataclasses.dataclass
    class Local:
        a: int

    with pytest.raises(
        CheckpointError, match=r"'x' cannot be saved: the class .*Local is not found"
    ):
        checkpointer.save(1, {"x": Local(1)})


def test_a_state_that_contains_itself_is_refused(checkpointer: Checkpointer) -> None:
    inner: dict[str, Any] = {"w": torch.ones(1)}
    state = {"a": {"b": [inner]}}
    inner["up"] = state["a"]
    with pytest.raises(CheckpointError, match=r"'a\.b\.0\.up' cannot be saved: it is a again"):
        checkpointer.save(1, state)
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"d": deep}
    with pytest.raises(CheckpointError, match="nested too deeply"):
        checkpointer.save(1, deep)


def test_nothing_is_imported_because_a_checkpoint_names_it(tmp_path: Path) -> None:
    """Only the class of the present value is used, or of a module that was imported."""
    module = types.ModuleType("somewhere_else")
    source = (
        "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    rate: float\n"
        "    color: object = None\n    inner: object = None\n"
    )
    sys.modules["somewhere_else"] = module
    try:
        exec(source, vars(module))
        with Checkpointer(tmp_path / "c") as checkpointer:
            checkpointer.save(1, {"x": module.Config(0.25)}).wait(NET)
    finally:
        del sys.modules["somewhere_else"]
    (tmp_path / "somewhere_else.py").write_text("raise SystemExit('imported')")
    with Checkpointer(tmp_path / "c") as checkpointer, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        with pytest.raises(CheckpointMismatch, match=r"class somewhere_else:Config is not there"):
            checkpointer.restore({"x": None})
        state: dict[str, Any] = {"x": Config(1.0)}
        assert checkpointer.restore(state) == 1
        assert type(state["x"]) is Config
        assert state["x"].rate == 0.25


class Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise SystemExit("code was run")


@pytest.mark.parametrize(
    "node",
    [
        {"__outlast__": "enum", "type": "os:system", "name": "x"},
        {"__outlast__": "dataclass", "type": "subprocess:Popen", "fields": {"args": "x"}},
        {"__outlast__": "namedtuple", "type": "builtins:tuple", "items": {}},
        {"__outlast__": "dataclass", "type": "lazy_module:Thing", "fields": {}},
        {"__outlast__": "dataclass", "type": "os:path.join", "fields": {}},
        {"__outlast__": "namespace", "of": "dict", "fields": {}},
        {"__outlast__": "time", "args": [99] * 5, "fold": 0},
        {"__outlast__": "MINYEAR", "args": []},
        {"__outlast__": "array", "dtype": "|O", "shape": [1], "data": torch.zeros(8).byte()},
        {"__outlast__": "array", "dtype": "<f8", "shape": [1 << 40], "data": torch.zeros(8).byte()},
        {"__outlast__": "array", "dtype": "<f8", "shape": [-1], "data": torch.zeros(8).byte()},
        {"__outlast__": "zone", "key": "../../etc/passwd"},
        {"__outlast__": "deque", "items": 3, "maxlen": "x"},
        {"__outlast__": "no such kind"},
        {"__outlast__": ["a list"]},
        {"__outlast__": "enum"},
    ],
)
def test_a_forged_node_runs_nothing(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode((node,))


def test_a_dataclass_with_a_new_field_gets_its_default() -> None:
    node = encode(Config(0.5))
    del node["fields"]["color"]
    assert decode(node).color is Color.RED
    del node["fields"]["rate"]
    with pytest.raises(ValueError, match="has the fields"):
        decode(node)


@pytest.mark.slow
def test_plain_torch_reads_them_as_data(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": Point(1.5, Color.RED), "y": (1, "two")}).wait(NET)
    program = (
        "import sys; sys.modules['outlast'] = None\n"
        "import torch.distributed.checkpoint as dcp\n"
        "state = {'x': None, 'y': None}\n"
        f"dcp.load(state, checkpoint_id={str(folder_of(tmp_path, 1))!r}, no_dist=True)\n"
        "assert state['x']['items']['x'] == 1.5, state\n"
        "assert state['x']['items']['y']['name'] == 'RED', state\n"
        "assert state['y'] == (1, 'two')\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_rank_is_told_what_cannot_be_saved(ranks: Ranks, tmp_path: Path) -> None:
    with ranks("uneven", "one_cannot_be_saved", str(tmp_path / "c"), "", nprocs=2) as job:
        job.start_all()
        assert set(job.wait_all().values()) == {0}, job.errors(0)


class Base:
    __slots__ = ("kept",)


@dataclasses.dataclass
class WithSlot(Base):
    x: int = 1


class Pair(NamedTuple):
    a: int


class MorePair(Pair):
    pass


class Made(enum.Enum):
    ONE = 1

    @classmethod
    def _missing_(cls, value: object) -> Made:
        made = object.__new__(cls)
        made._name_, made._value_ = f"made{value}", value
        return made


def test_what_would_lose_an_attribute_is_refused() -> None:
    slotted, pair = WithSlot(), MorePair(1)
    slotted.kept, pair.more = 2, 3
    for value in (slotted, pair, Made(5)):
        with pytest.raises(Unsavable):
            encode(value)
    assert encode(Made.ONE)
    assert encode(WithSlot())


def test_a_value_is_pickled_again_when_it_is_another_one(tmp_path: Path) -> None:
    """Equal is not enough: `0.0 == -0.0 == False`. The bytes of the last one are used again."""
    rows: list[list[Any]] = [
        [(0.0, 1), [1, 2], 0.0],
        [(-0.0, 1), [1, 2], -0.0],
        [(-0.0, True), [1, True], False],
        [(float("nan"), "1"), [1, "2"], 0],
        [[float("nan"), "1"], (1, "2"), "0.0"],
        [("nan", (1,)), (1, [2]), ("0.0",)],
    ]
    with Checkpointer(tmp_path) as checkpointer:
        for step, row in enumerate([*rows, *reversed(rows)]):
            state = {str(number): value for number, value in enumerate(row)}
            checkpointer.save(step, {"all": tuple(state.values()), **state}).wait(NET)
            found: dict[str, Any] = {}
            assert checkpointer.restore(found, step=step) == step
            assert repr([found[str(n)] for n in range(3)]) == repr(row)
            assert repr(found["all"]) == repr(tuple(row))


def test_a_list_that_was_changed_in_place_is_pickled_again(tmp_path: Path) -> None:
    order = [3, 1, 2]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"order": order}).wait(NET)
        order.sort()
        checkpointer.save(2, {"order": order}).wait(NET)
        found: dict[str, Any] = {}
        assert checkpointer.restore(found) == 2
        assert found == {"order": [1, 2, 3]}

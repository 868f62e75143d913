"""Finds the moment at which a thread enters a collective: with the interpreter's profile hook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_COLLECTIVES = frozenset({
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "gather", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
})  # fmt: skip


def on_next_collective(entered: Callable[[], None]) -> Callable[[], None]:
    """Calls `entered` when this thread next calls a collective of torch.distributed, or begins a
    backward pass, where DDP and FSDP have their collectives. Its exceptions are those of the
    collective. Returns a function that withdraws it, to be called in the same thread.
    """
    before = sys.getprofile()

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and _is_collective(frame.f_code):
            withdraw()
            entered()

    def withdraw() -> None:
        if sys.getprofile() is hook:
            sys.setprofile(before)

    sys.setprofile(hook)
    return withdraw


def _is_collective(code: CodeType) -> bool:
    if code.co_name == "_engine_run_backward":
        return code.co_filename.endswith("torch/autograd/graph.py")
    return code.co_name in _COLLECTIVES and code.co_filename.endswith("distributed_c10d.py")

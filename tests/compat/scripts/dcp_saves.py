"""Two ranks save in the background with the functions of 0.4, and load with plain PyTorch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from outlast.compat.nvrx.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from outlast.compat.nvrx.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from outlast.compat.nvrx.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from outlast.compat.nvrx.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

from outlast.errors import AsyncCallError

FOLDER = Path(sys.argv[2])


def state(value: float) -> dict[str, object]:
    return {
        "shared": torch.full((3,), value),
        f"of_rank_{dist.get_rank()}": torch.full((2,), value + dist.get_rank()),
        "step": 7,
    }


def schedule(queue: AsyncCallsQueue, folder: Path, tensors: dict[str, object]) -> None:
    writer = FileSystemWriterAsync(folder, thread_count=2)
    planned = save_state_dict_async_plan(tensors, writer, None, 0, enable_cache=True)
    write, preload, arguments = writer.get_save_function_and_args()

    def finalize() -> None:
        save_state_dict_async_finalize(*planned)
        dist.barrier()

    request = AsyncRequest(write, tuple(arguments), [finalize], preload_fn=preload)
    queue.schedule_async_request(request)


def main() -> None:
    dist.init_process_group("gloo")
    queue = AsyncCallsQueue(persistent=False)
    saved = state(1.0)
    schedule(queue, FOLDER / "good", saved)
    saved["shared"].zero_()  # type: ignore[attr-defined] # after the snapshot
    queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    loaded = state(0.0)
    dcp.load(loaded, storage_reader=CachedMetadataFileSystemReader(FOLDER / "good"))
    mine = loaded[f"of_rank_{dist.get_rank()}"]
    values = [loaded["shared"].tolist(), mine.tolist(), loaded["step"]]  # type: ignore[attr-defined]
    error = ""
    folder = FOLDER / "bad"
    writer = FileSystemWriterAsync(folder)
    planned = save_state_dict_async_plan(state(2.0), writer)
    write, preload, arguments = writer.get_save_function_and_args()
    if dist.get_rank() == 1:
        arguments[0] = str(FOLDER / "missing" / "results")
    finalize = [lambda: save_state_dict_async_finalize(*planned)]
    queue.schedule_async_request(AsyncRequest(write, tuple(arguments), finalize, {}, preload))
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except AsyncCallError as e:
        error = str(e)
    queue.close()
    complete = [(FOLDER / name / ".metadata").exists() for name in ("good", "bad")]
    hidden = sorted(x.name for x in (FOLDER / "good").iterdir() if "results" in x.name)
    os.write(1, json.dumps([values, error, complete, hidden]).encode() + b"\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

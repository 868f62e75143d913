"""The writer process with another storage, for fault injection (`observers.set_writer_program`).

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

from outlast.async_checkpoint.storage.manifest import MANIFEST
from outlast.async_checkpoint.storage.protocol import FileWriter, Storage
from outlast.async_checkpoint.writer.main import main

__all__ = ["MANIFEST", "FileWriter", "Storage", "run_writer"]


def run_writer(wrap: Callable[[Storage], Storage]) -> None:
    """Runs the writer process; `wrap` is applied to its storage."""
    main(wrap)

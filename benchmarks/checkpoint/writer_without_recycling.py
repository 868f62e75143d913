"""The writer process of a checkpointer that removes files instead of recycling them."""

from __future__ import annotations

from pathlib import Path

from outlast.async_checkpoint.storage.recycled_files import RecycledFiles
from outlast.async_checkpoint.writer.main import main


def _keep_nothing(self: RecycledFiles, folder: Path) -> bool:
    return False


if __name__ == "__main__":
    RecycledFiles.keep = _keep_nothing  # type: ignore[method-assign]
    main()

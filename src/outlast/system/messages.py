"""Messages between the main process and its writer: a line of JSON, and bytes behind it."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["pack", "unpack"]


def pack(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """One payload of a channel."""
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + blob


def unpack(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """What `pack` made the payload of."""
    header, _, blob = payload.partition(b"\n")
    return json.loads(header), blob

"""The secret of a job on many hosts: `OUTLAST_TOKEN`, or the file of `--token-file`.

Only launchers know it. It is never sent, and has no text form: what is sent or given to workers is
derived from it, each value for one purpose, and tells nothing about the secret or other values.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

LEAST_CHARS = 16
"""A shorter secret could be guessed from one recorded handshake, without asking any host."""


class Secret:
    """Derives keys from the secret. Its `repr` is that of `object`: no log can show the value."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def derive(self, purpose: str, *parts: bytes) -> bytes:
        """32 bytes that depend on all arguments: HMAC-SHA256 of the purpose and the parts. The
        lengths stand before the contents, so that no two lists of arguments give the same bytes.
        """
        texts = (purpose.encode(), *parts)
        message = b"".join(len(text).to_bytes(8, "big") + text for text in texts)
        return hmac.digest(self._value, message, "sha256")


def read_secret(token: str, file: Path | None) -> Secret | None:
    """The secret in `file`, else `token`; `None` without either."""
    where, text = "OUTLAST_TOKEN", token
    if file is not None:
        where = f"--token-file {file}"
        try:
            with file.open() as opened:
                mode = os.fstat(opened.fileno()).st_mode & 0o777
                text = opened.read()
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{where}: cannot be read: {getattr(e, 'strerror', e)}") from e
        if mode & 0o077:
            raise ValueError(
                f"{where}: other users have access to it (mode {mode:04o}): chmod 600 {file}"
            )
    elif not token:
        return None
    text = text.strip()
    if len(text) < LEAST_CHARS:
        raise ValueError(
            f"{where}: {len(text)} characters, and at least {LEAST_CHARS} are needed; make one "
            "with: openssl rand -hex 32"
        )
    return Secret(text.encode())

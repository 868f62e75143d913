"""How a background call ended: the record that one rank writes and all ranks read.

These records come from other hosts, so they are JSON, and nothing in them is executed.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from typing import Any

from outlast.errors import AsyncCallError
from outlast.system.error_text import describe, traceback_text

__all__ = ["CallFailure", "Verdict"]


@dataclasses.dataclass(frozen=True)
class CallFailure:
    """Why a call has failed, as reported by the rank on which it failed.

    Attributes:
        call: its index in the order of scheduling.
        name: of the function.
        rank: where it failed, in the group of the ledger.
        host: the name of that rank's host.
        cause: what happened, in one line: `ValueError: ...`, `killed by SIGKILL`.
        traceback: as text; empty if there is none (a killed process leaves none).
    """

    call: int
    name: str
    rank: int
    host: str
    cause: str
    traceback: str = ""

    @classmethod
    def here(cls, call: int, name: str, rank: int, cause: str, traceback: str = "") -> CallFailure:
        """A failure on this host."""
        return cls(call, name, rank, socket.gethostname(), cause, traceback)

    @classmethod
    def of(cls, error: BaseException, call: int, name: str, rank: int) -> CallFailure:
        """An exception on this host, with its traceback."""
        return cls.here(call, name, rank, describe(error), traceback_text(error))

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> CallFailure:
        """The inverse of `encode`.

        Raises:
            AsyncCallError: if `data` is not such a record.
        """
        try:
            values: dict[str, Any] = json.loads(data)
            return cls(
                call=int(values["call"]),
                name=str(values["name"]),
                rank=int(values["rank"]),
                host=str(values["host"]),
                cause=str(values["cause"]),
                traceback=str(values["traceback"]),
            )
        except (ValueError, KeyError, TypeError) as e:
            raise AsyncCallError(f"not a record of a failed call: {data[:200]!r}") from e

    def to_error(self) -> AsyncCallError:
        """The error that every rank raises."""
        text = f"background call {self.call} ({self.name}) failed on rank {self.rank} on "
        text += f"{self.host}: {self.cause}"
        return AsyncCallError(f"{text}\n{self.traceback.rstrip()}" if self.traceback else text)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a call ended, for all ranks: all of them are done, or one has failed."""

    failure: CallFailure | None = None

    @property
    def done(self) -> bool:
        """Whether every rank has finished."""
        return self.failure is None

    def encode(self) -> bytes:
        """As JSON; `{}` for success."""
        return b"{}" if self.failure is None else self.failure.encode()

    @classmethod
    def decode(cls, data: bytes) -> Verdict:
        """The inverse of `encode`."""
        return cls() if data == b"{}" else cls(CallFailure.decode(data))

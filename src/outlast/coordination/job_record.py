"""The record of the newest call of a wrapped function: one key in the launcher's store. The ranks
write it, each change as a compare-and-set; the launcher reads it.
"""

from __future__ import annotations

import dataclasses
import enum
import json

from typing_extensions import Self

JOB_KEY = "outlast/job"


class JobState(enum.Enum):
    """The state of the wrapped function."""

    PLAIN = "plain"
    """The script does not use `Wrapper`, or has not called the wrapped function yet."""
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"


@dataclasses.dataclass(frozen=True)
class CallRecord:
    """The value of the key."""

    state: JobState = JobState.PLAIN  # of the newest call of a wrapped function
    prefix: str = ""  # of the keys of the call; empty if the record does not name it
    # the name of the process that has printed why the job was aborted; empty if none has
    reporter: str = ""
    call: int = dataclasses.field(default=-1, compare=False)  # its number

    def encode(self) -> bytes:
        fields = {"call": self.call, "state": self.state.value, "prefix": self.prefix}
        reported = {"reporter": self.reporter} if self.reporter else {}
        return json.dumps({**fields, **reported}).encode()

    @classmethod
    def parse(cls, value: bytes | None) -> Self:
        """Parses the value in the store. One that cannot be parsed counts as a running call: it may
        be that of another version of `Wrapper`, and keeping the survivors is safer than ending
        them.
        """
        if value is None:
            return cls()
        try:
            fields = json.loads(value)
            state = JobState(fields["state"])
            texts = {name: str(fields.get(name, "")) for name in ("prefix", "reporter")}
            return cls(state, **texts, call=int(fields.get("call", -1)))
        except (ValueError, TypeError, KeyError):
            return cls(JobState.RUNNING)

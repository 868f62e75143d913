"""Whether the calls of several clients on one key could have been made one after another.

After Wing and Gong, with Lowe's memory of what was tried: a search for an order in which each call
comes between its begin and its end, and has the result that it reported. A call whose outcome is
not known may come at any time after its begin, or never.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

NEVER = float("inf")
PURE = ("read", "wait_for")


@dataclasses.dataclass(frozen=True)
class Call:
    """One operation of a store on one key.

    Attributes:
        end: `NEVER` if its outcome is not known; then `result` means nothing.
    """

    name: str
    argument: str
    begin: float
    end: float = NEVER
    result: str | None = None
    who: str = ""

    @property
    def known(self) -> bool:
        """Whether it has reported its result."""
        return self.end < NEVER

    @property
    def only_reads(self) -> bool:
        """Whether it changes nothing, wherever it comes: a claim that another has won is such."""
        return self.name in PURE or (self.name == "claim" and self.result != self.argument)

    def apply(self, value: str | None) -> tuple[str | None, str | None, bool]:
        """The value afterwards, the result, and whether it can come here at all."""
        name, argument = self.name, self.argument
        if name in PURE:
            return value, value, name == "read" or value is not None
        if name == "put":
            return argument, None, True
        if name == "append":
            return (value or "") + argument, None, True
        if name == "delete":
            return None, None, True
        if name == "claim":
            held = argument if value is None else value
            return held, held, True
        if name == "add":
            total = str(int(value or "0") + int(argument))
            return total, total, True
        raise ValueError(f"unknown operation {name!r}")


class TooLong(Exception):
    """The search was given up."""


def is_linearizable(calls: Sequence[Call], most: int = 300_000) -> bool:
    """Whether there is such an order.

    Raises:
        TooLong: after `most` states.
    """
    seen = "\n".join(call.result for call in calls if call.known and call.result is not None)
    todo = sorted((c for c in calls if c.known or _matters(c, seen)), key=lambda call: call.begin)
    must = sum(1 << i for i, call in enumerate(todo) if call.known)
    by_end = sorted((i for i, call in enumerate(todo) if call.known), key=lambda i: todo[i].end)
    stack: list[tuple[int, str | None, int]] = [(0, None, 0)]
    tried = {(0, None)}
    while stack:
        if len(tried) > most:
            raise TooLong
        done, value, ended = stack.pop()
        if done & must == must:
            return True
        while done >> by_end[ended] & 1:
            ended += 1
        limit = todo[by_end[ended]].end
        following = []
        for i, call in enumerate(todo):
            if call.begin > limit:
                break
            if done >> i & 1:
                continue
            after, result, possible = call.apply(value)
            if not possible or (call.known and result != call.result):
                continue
            if call.known and call.only_reads:
                # It fits now: if any order exists, one exists in which it comes now.
                following = [(done | 1 << i, after)]
                break
            following.append((done | 1 << i, after))
        for state in following:
            if state not in tried:
                tried.add(state)
                stack.append((*state, ended))
    return False


def _matters(call: Call, seen: str) -> bool:
    """Whether a call of unknown outcome may explain what others saw. Values are unique: a value
    that no result holds may be taken for never written.
    """
    if call.name in PURE:
        return False
    return call.name in ("add", "delete") or call.argument in seen

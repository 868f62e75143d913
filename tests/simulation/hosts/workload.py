"""What the simulated hosts ask of the store."""

from __future__ import annotations

import random

from outlast.coordination.replicated.operations import Operation


def next_operation(r: random.Random, host: str, number: int, free_entry: str) -> Operation:
    """An operation; `host` and `number` make its value unique. A decision is claimed for the entry
    of the chain that was free a moment ago.
    """
    unique = f"{host}.{number};".encode()
    kind = r.randrange(12)
    if kind == 10 and r.random() < 0.6:
        return Operation("put", f"w/read-lease/{host}", b"1")
    if kind >= 10:
        over = f"w/over/{r.randrange(6)}"
        return Operation(r.choice(["claim", "claim", "read", "wait_for"]), over, unique)
    if kind == 0 and r.random() < 0.3:
        return Operation("claim", free_entry, unique)
    if kind == 0:
        return Operation("claim", f"claim{r.randrange(3)}", unique)
    if kind in (1, 2):
        return Operation("add", "sum", amount=1)
    if kind in (3, 4):
        return Operation("append", "list", unique)
    if kind == 5:
        return Operation("put", f"event{r.randrange(3)}", unique)
    if kind == 6:
        return Operation("wait_for", f"event{r.randrange(4)}")
    if kind == 7:
        return Operation("compare_set", "claim0", unique, expected=r.choice([b"", unique]))
    return Operation("read", r.choice(["sum", "list", "event0", "claim0"]))

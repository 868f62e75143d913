"""The numbers of the protocol of torch's TCP store (`TCPStoreBackend.hpp`).

Unchanged from torch 2.6 to 2.13, except that later versions have more requests. A request is one
byte, then its arguments in the machine's byte order: numbers have 8 bytes, and keys and values are
preceded by their length. The first request of a connection is VALIDATE, with a magic number.
"""

from __future__ import annotations

import enum
import struct

MAGIC = 0x3C85F7CE
LENGTH = struct.Struct("=Q")
NUMBER = struct.Struct("=q")
WORD = struct.Struct("=I")


class Query(enum.IntEnum):
    """The kinds of requests."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18

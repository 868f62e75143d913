"""From the name of a state, which may be any text, to the name of its file.

Letters, digits and `_.-~` stand for themselves, every other byte of the UTF-8 is written `%XX`, so
no two names share a file, and none leaves the folder. A name that would be too long for a file
system is cut, and a checksum of the whole put behind a `+`, which no quoted name has.
"""

from __future__ import annotations

import urllib.parse

from outlast.async_checkpoint.storage.manifest import checksum

__all__ = ["file_name"]

_SUFFIX = ".state"
_LONGEST = 200  # file systems take 255 bytes
_KEPT = 100
_EMPTY = "%"  # nothing that is quoted looks like this


def file_name(name: str) -> str:
    """The file of the state `name`; another name has another file."""
    data = name.encode("utf-8", "surrogatepass")
    quoted = urllib.parse.quote(data, safe="")
    if len(quoted) > _LONGEST:
        quoted = f"{quoted[:_KEPT]}+{checksum(data)}"
    return (quoted or _EMPTY) + _SUFFIX

"""Processes, descriptors, files and arguments: nothing here is specific to training.

Only `devices`, `streams` and `symmetric_memory` import torch: background processes use the others,
and must start fast.

Every package of `outlast` that needs the operating system imports a module of this one, so that on
another system than Linux the import fails here.
"""

import sys

if sys.platform != "linux":
    raise ImportError(
        f"outlast needs Linux, and this is {sys.platform}: it relies on pidfds, /proc and epoll, "
        "which other systems do not have"
    )

"""Processes, descriptors, files and arguments: nothing here is specific to training.

* `processes`: watch, signal and reap other processes; wait for descriptors; lower the own priority.
* `background_process`: start another program beside this one, and end it.
* `main_program`: run a program in this process; end it without a search for garbage.
* `fork`: run a function in a forked child, apart from its parent.
* `channel`: messages and descriptors between two processes of a host.
* `shared_memory`: memory that two processes of a host share.
* `sockets`: the sockets of this process.
* `parallel`: start a thread; one piece of work in several threads; a wait in a thread, which can be
  interrupted.
* `files`: fsync, and the lock of a file.
* `error_text`: an exception, an exit code or a signal as text; what tracebacks keep alive.
* `frames`: what another thread executes; the user's part of a stack or traceback.
* `arguments`: check and convert the arguments of public functions.
* `lazy_exports`: packages that import their modules on first use.

* `devices`, `streams`: what torch does not offer for all types of accelerators alike.

These two alone import torch: background processes use the others, and must start fast.

Every package of `outlast` that needs the operating system imports a module of this one, so that on
another system than Linux the import fails here.
"""

import sys

if sys.platform != "linux":
    raise ImportError(
        f"outlast needs Linux, and this is {sys.platform}: it relies on pidfds, /proc and epoll, "
        "which other systems do not have"
    )

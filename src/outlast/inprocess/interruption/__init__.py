"""Interrupting the main thread: the interrupter, `atomic()`, the monitor thread."""

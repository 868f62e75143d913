"""The figures of a report: goodput, redone steps, phases of restarts, checkpoints."""

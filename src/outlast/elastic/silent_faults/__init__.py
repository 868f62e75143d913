"""Faults that raise no error: parameters that differ or are not finite, ranks that are slow."""

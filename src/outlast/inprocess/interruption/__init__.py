"""The interrupt of the function: the monitor thread, `atomic()`, stack samples, fault echoes."""

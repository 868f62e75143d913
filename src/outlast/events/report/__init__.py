"""The report of a run, made from its events."""

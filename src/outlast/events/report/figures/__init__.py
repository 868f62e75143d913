"""The figures of the report, each from the events that it is about."""

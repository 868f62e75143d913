"""Training jobs that outlast their faults."""
